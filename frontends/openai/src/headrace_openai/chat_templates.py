"""From messages to a prompt, for a model that has no input ``messages``.

The model parameter ``chat_template`` is a template of Jinja: the text itself, or the name of a file in the model's
directory. Without it, the prompt is a line for each message::

    system: You are kind.
    user: Hello!
    assistant:
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from headrace import ConfigError, ModelConfig, ModelView, ServedModel
from headrace_openai.openai_errors import BadMember

PARAMETER, PARSER = "chat_template", "tool_call_parser"
#: The size of the file of a template, in bytes.
_MOST_BYTES = 1 << 20


class ChatTemplate:
    """A template that is compiled. Any thread.

    Raises `ConfigError` if it is wrong, with the line.
    """

    def __init__(self, source: str, who: str) -> None:
        from headrace_openai.template_process import TemplateProcess

        self._process = TemplateProcess(source, who)

    async def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], more: Mapping[str, Any]) -> str:
        """Return the prompt, on a thread: a template may take long. ``more`` are further values for it.

        Raises `InvalidArgument` if the template refuses the messages, takes too long, or fails.
        """
        return await asyncio.to_thread(self._render, messages, tools, more)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], more: Mapping[str, Any]) -> str:
        values = {"add_generation_prompt": True, "bos_token": "", "eos_token": "", **more}
        values |= {"messages": [*map(_with_arguments, messages)], "tools": list(tools) or None}
        return self._process.render(values)


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``message`` with the arguments of its tool calls as objects, as templates expect. In a chat, they are
    JSON in strings."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with contextlib.suppress(KeyError, TypeError, ValueError):  # what the model wrote stays as it is
            function["arguments"] = orjson.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


class LoadedTemplates:
    """The templates of the loaded versions of one server."""

    def __init__(self) -> None:
        self._loaded: WeakKeyDictionary[Any, ChatTemplate] = WeakKeyDictionary()  # by `ModelView.occupancy`

    def load(self, model: ServedModel) -> None:
        """Compile the template of ``model`` if it has one, and check its parser. Called when it is loaded, by a thread.

        The template of a model with the input ``messages`` is its engine's. Raises `ConfigError`, `LoadError`.
        """
        from headrace_openai.tool_call_parsers import PARSERS

        parameters, inputs = model.config.parameters, model.signature.inputs
        if (name := parser_name(model.config)) and name not in PARSERS:
            known = ", ".join(PARSERS)
            raise ConfigError(f"model '{model.name}': parameter '{PARSER}' is '{name}', expected one of {known}")
        if PARAMETER not in parameters or "text_input" not in inputs or "messages" in inputs:
            return
        value, who = parameters[PARAMETER].string_value, f"model '{model.name}': parameter '{PARAMETER}'"
        if find_spec("jinja2") is None:
            raise ConfigError(
                f"{who} needs Jinja, which is not installed here: pip install 'headrace-openai[templates]'"
            )
        source = value
        if "{{" not in value and "{%" not in value:
            path = model.model.resource_or_above(value)
            if (size := path.stat().st_size) > _MOST_BYTES:
                raise ConfigError(f"{who} is a file of {size} bytes, the limit is {_MOST_BYTES}")
            source = path.read_text(encoding="utf-8", errors="replace")
        self._loaded[model.model_queue] = ChatTemplate(source, who)

    def of(self, view: ModelView) -> ChatTemplate | None:
        """Return the template of a loaded version, if it has one."""
        return self._loaded.get(view.occupancy)


def parser_name(config: ModelConfig) -> str:
    """Return the model parameter ``tool_call_parser``; empty if there is none."""
    return config.parameters[PARSER].string_value if PARSER in config.parameters else ""


def plain_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt for a model without a template. Raises `BadMember` for what it can not express."""
    lines = []
    for place, message in enumerate(messages):
        content = message["content"]
        if type(content) is list:
            content = "\n".join(part.get("text", "") for part in content)
        if message.get("tool_calls"):
            raise BadMember(f"messages[{place}].tool_calls", "this model has no tools: it has no chat_template")
        lines.append(f"{message['role']}: {content}\n")
    return "".join((*lines, "assistant:"))
