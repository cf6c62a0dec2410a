"""From messages to a prompt, by the template of the model.

A template is a program (Jinja, in transformers' sandbox). It reads no files, but it may run for ever, or take all
memory. So it runs in a process with limits: `headrace_transformers.render_chats`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace import InvalidArgument
from headrace_llm import BoundedProcess, GenerationRequest, shown
from headrace_transformers.image_prompts import for_template

#: The longest time that a template may run, in seconds, and the memory of its process, in bytes.
TEMPLATE_S = 2.0
_LIMIT_BYTES: Final = 512 << 20


class ChatPrompts:
    """Makes prompts by ``template``, or by that of ``tokenizer``, if it has one. Any thread; one chat at a time."""

    def __init__(self, tokenizer: Any, template: Any = None, reads_images: bool = False) -> None:
        self._template = template or getattr(tokenizer, "chat_template", None)
        self._content = for_template if reads_images else _joined
        self._special = dict(getattr(tokenizer, "special_tokens_map", {}))
        self._process = BoundedProcess("headrace_transformers.render_chats", _LIMIT_BYTES)

    def render(self, request: GenerationRequest) -> str:
        """Return the prompt of the messages and tools of ``request``. Blocks, for at most `TEMPLATE_S` and a start.

        Raises `InvalidArgument`, or `BackendError` if the process cannot start.
        """
        if not self._template:
            raise InvalidArgument("this model has no chat template: send text_input instead of messages")
        has_tools = bool(request.tools) and request.tool_choice != "none"
        if has_tools and "tools" not in str(self._template):
            raise InvalidArgument("the chat template of this model has no tools")
        messages = [self._message(each) for each in request.messages or ()]
        values = [self._template, self._special, messages, list(request.tools) if has_tools else None]
        answer = self._process.ask(json.dumps(values, default=str).encode(), TEMPLATE_S)
        if answer is None:
            raise InvalidArgument(
                f"the chat template took more than {TEMPLATE_S:g} s or {_LIMIT_BYTES >> 20} MiB for these messages"
            )
        text, wrong = json.loads(answer)
        if wrong:
            raise InvalidArgument(f"the chat template failed for these messages: {wrong}")
        return str(text)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``message`` as templates expect it: content as text, arguments of calls as objects."""
        if type(message.get("role")) is not str:
            raise InvalidArgument(f"a message must have a role, which is a string; got {shown(message)}")
        made = dict(message)
        if type(made.get("content")) is list:
            made["content"] = self._content(made["content"])
        elif type(made.get("content", "")) not in (str, type(None)):
            raise InvalidArgument(f"the content of a message must be text or parts, got {shown(made['content'])}")
        if type(made.get("tool_calls")) is list:
            made["tool_calls"] = [_call(each) for each in made["tool_calls"]]
        return made

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _joined(parts: Sequence[Any]) -> str:
    for part in parts:
        if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
            kind = part.get("type") if type(part) is dict else part
            raise InvalidArgument(f"this model reads text only: a message has a part of type {shown(kind)}")
    return "".join(part["text"] for part in parts)


def _call(call: Any) -> Any:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or type(function.get("arguments")) is not str:
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call
