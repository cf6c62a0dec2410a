"""From messages to a prompt, by the template of the model.

A template is a program (Jinja, in transformers' sandbox): it reads no files, but it may run for ever. So it has a time
limit, after which an exception is raised in its thread.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from headrace import InvalidArgument, one_line
from headrace_llm import GenerationRequest, shown

T = TypeVar("T")

#: The longest time that a template may run, in seconds of wall-clock time.
TEMPLATE_S = 2.0


class TemplateTimeout(BaseException):
    """Raised in the thread of a template that runs for too long. No template can catch it."""


def render_chat(tokenizer: Any, request: GenerationRequest) -> str:
    """Return the prompt of the messages and tools of ``request``. Raises `InvalidArgument`."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise InvalidArgument("this model has no chat template: send text_input instead of messages")
    has_tools = bool(request.tools) and request.tool_choice != "none"
    if has_tools and "tools" not in str(template):
        raise InvalidArgument("the chat template of this model has no tools")
    messages = [_message(each) for each in request.messages or ()]

    def render() -> str:
        tools = list(request.tools) if has_tools else None
        text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        return text

    try:
        return within(TEMPLATE_S, render)
    except TemplateTimeout:
        raise InvalidArgument(f"the chat template took more than {TEMPLATE_S:g} s for these messages") from None
    except Exception as error:  # whatever the template does
        text = one_line(str(error))[:300]
        raise InvalidArgument(f"the chat template failed for these messages: {type(error).__name__}: {text}") from None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``message`` as templates expect it: content as text, arguments of calls as objects."""
    if type(message.get("role")) is not str:
        raise InvalidArgument(f"a message must have a role, which is a string; got {shown(message)}")
    made = dict(message)
    if type(made.get("content")) is list:
        made["content"] = _joined(made["content"])
    if type(made.get("content", "")) not in (str, type(None)):
        raise InvalidArgument(f"the content of a message must be text or parts, got {shown(made['content'])}")
    if type(made.get("tool_calls")) is list:
        made["tool_calls"] = [_call(each) for each in made["tool_calls"]]
    return made


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


def within(seconds: float, run: Callable[[], T]) -> T:
    """Return ``run()``. Raises `TemplateTimeout` if Python code in it runs for longer than ``seconds``."""
    thread, lock = threading.get_ident(), threading.Lock()
    has_ended = is_raising = False

    def interrupt() -> None:
        nonlocal is_raising
        with lock:
            if not has_ended:
                is_raising = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TemplateTimeout))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            return run()
        finally:
            with lock:
                has_ended = True
            timer.cancel()
    finally:
        if is_raising:
            # It may not have been raised yet: it must not be, later, in other code of this thread.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
