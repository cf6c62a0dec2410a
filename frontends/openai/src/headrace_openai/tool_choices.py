"""The members ``tools`` and ``tool_choice``: the tools that a model gets, and how its calls are found."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from headrace_llm import ToolCallParser
from headrace_openai.body_members import encoded, flag, members, objects, shown
from headrace_openai.openai_errors import BadMember
from headrace_openai.text_models import TextModel
from headrace_openai.tool_call_parsers import AnyToolParser, NamedToolParser

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}", re.ASCII)
_WORDS = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The plan for the tool calls of a model. ``tools`` are the tools that it gets.

    ``inputs`` are the inputs ``tools`` and ``tool_choice`` as JSON; empty if the template or the messages have them.
    ``constraint`` is what its text is forced to be; empty for anything. ``parser`` makes what finds calls in the text.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    inputs: tuple[bytes, bytes] = (b"", b"")
    constraint: Mapping[str, Any] | None = None
    parser: Callable[[], ToolCallParser] | None = None
    has_one_call: bool = False


def plan_tools(document: Mapping[str, Any], model: TextModel) -> ToolPlan:
    """Return how ``model`` calls the tools in ``document``. Raises `BadMember` if it can not."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if document.get(old) is not None:
            raise BadMember(old, f"{old} is the old form: use {new}")
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(objects(document, "tools", MAX_TOOLS))]
    choice = _choice(document.get("tool_choice"), tools)
    is_single = document.get("parallel_tool_calls") is not None and not flag(document, "parallel_tool_calls")
    if not tools or choice == "none":
        return ToolPlan()
    if choice == "required" or type(choice) is dict:
        if "sampling_parameters" in model.inputs:
            return _forced(tools, choice)
        if not {"tools", "tool_choice"} <= model.inputs:
            why = "neither the input 'tool_choice', nor sampling parameters for structured output"
            raise BadMember("tool_choice", f"model '{model.name}' can not be forced to call a tool: it has {why}")
    if "tools" in model.inputs:
        return ToolPlan(tools, _inputs(tools, choice), parser=_parser(model), has_one_call=is_single)
    if "messages" in model.inputs or model.template is None:
        raise BadMember("tools", f"model '{model.name}' has no tools: neither the input 'tools' nor a chat_template")
    if model.tool_call_parser is None:
        raise BadMember("tools", f"model '{model.name}' has no parameter 'tool_call_parser': its calls are not found")
    return ToolPlan(tools, parser=model.tool_call_parser, has_one_call=is_single)


def _inputs(tools: Sequence[Mapping[str, Any]], choice: str | dict[str, Any]) -> tuple[bytes, bytes]:
    return encoded(tools, "tools"), orjson.dumps(choice)


def _parser(model: TextModel) -> type[ToolCallParser] | None:
    return None if "tool_calls" in model.outputs else model.tool_call_parser


def _forced(tools: Sequence[Mapping[str, Any]], choice: str | dict[str, Any]) -> ToolPlan:
    """Return the plan for a tool that must be called: the text is forced to be one call.

    Not all engines force a call by themselves: llama.cpp does not for some templates, without an error.
    """
    if type(choice) is not dict:
        return ToolPlan(tools, constraint={"json": _any_of(tools)}, parser=AnyToolParser, has_one_call=True)
    name = choice["function"]["name"]
    named = [tool for tool in tools if tool["function"]["name"] == name][:1]
    schema = named[0]["function"].get("parameters") or {"type": "object"}
    return ToolPlan(named, constraint={"json": schema}, parser=partial(NamedToolParser, name), has_one_call=True)


def shown_tools(plan: ToolPlan, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` for a model that applies its template and is forced to call a tool of ``plan``.

    Engines refuse tools beside structured output, so the tools are a system message.
    """
    if plan.constraint is None or not messages:
        return messages
    tools = orjson.dumps([tool["function"] for tool in plan.tools]).decode()
    form = "its arguments" if isinstance(plan.parser, partial) else 'an object with its "name" and "arguments"'
    instruction = f"Answer by a call of one of these functions, as JSON: {form}.\n{tools}"
    first, *rest = messages
    if first["role"] == "system" and type(first["content"]) is str:
        return [{**first, "content": f"{first['content']}\n\n{instruction}"}, *rest]
    return [{"role": "system", "content": instruction}, *messages]


def _tool(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if tool.get("type") != "function":
        raise BadMember(f"{where}.type", f"{where}.type must be 'function', got {shown(tool.get('type'))}")
    function = members(tool, "function", f"{where}.function")
    name = function.get("name")
    if type(name) is not str or not _NAME.fullmatch(name):
        where = f"{where}.function.name"
        raise BadMember(where, f"{where} must be 1 to 64 letters, digits, '_', '-' and '.', got {shown(name)}")
    members(function, "parameters", f"{where}.function.parameters")
    return tool


def _choice(given: Any, tools: Sequence[Mapping[str, Any]]) -> str | dict[str, Any]:
    """Return ``auto``, ``none``, ``required``, or the tool that must be called."""
    if given is None:
        return "auto"
    if type(given) is str and given in _WORDS:
        if given == "required" and not tools:
            raise BadMember("tool_choice", "tool_choice is 'required', and there are no tools")
        return given
    if type(given) is not dict or given.get("type") != "function":
        known = ", ".join(_WORDS)
        raise BadMember("tool_choice", f"tool_choice must be one of {known}, or a function, got {shown(given)}")
    name = members(given, "function", "tool_choice.function").get("name")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise BadMember("tool_choice", f"tool_choice names the tool {shown(name)}, which is none of tools")
    return {"type": "function", "function": {"name": name}}


def _any_of(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the schema of a call of one of ``tools``."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
    }
