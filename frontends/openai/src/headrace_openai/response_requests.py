"""The body of ``/v1/responses`` as one of ``/v1/chat/completions``: items become messages.

Nothing is stored: a request has the whole conversation. Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_openai.body_members import shown
from headrace_openai.chat_messages import MAX_MESSAGES
from headrace_openai.openai_errors import BadMember

#: Members that need a store, or parts that a server of models does not have, and the values that ask for nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "store": (None, False),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
}
_WHY_REFUSED = {
    "background": "a response is given at once",
    "conversation": "nothing is stored: send the whole conversation",
    "previous_response_id": "nothing is stored: send the whole conversation as input",
    "prompt": "nothing is stored: send the text itself as input or instructions",
    "store": "nothing is stored",
    "truncation": "a conversation beyond the context of the model is an error",
    "max_tool_calls": "the caller calls tools, not the server",
}
#: Members with the same meaning in chat completions under another name.
_RENAMED = {"max_output_tokens": "max_completion_tokens"}
#: Members that are read here, or change nothing.
_READ = frozenset(
    ("input", "instructions", "tools", "tool_choice", "text", "include", "reasoning", "stream_options", *_REFUSED)
)
#: The value of ``include`` for log probabilities. What else it may ask for is not there, and left out.
LOGPROBS = "message.output_text.logprobs"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def chat_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``document`` as the body of a chat completion. Raises `BadMember`.

    Members that only chat completions have, such as ``seed`` and ``stop``, keep their meaning.
    """
    for name, nothing in _REFUSED.items():
        if document.get(name) not in nothing:
            raise BadMember(name, f"{name} is not supported: {_WHY_REFUSED[name]}")
    chat = {_RENAMED.get(name, name): value for name, value in document.items() if name not in _READ}
    if _includes_logprobs(document):
        chat["logprobs"] = True
    elif document.get("top_logprobs"):
        raise BadMember("top_logprobs", f"top_logprobs needs include to have '{LOGPROBS}'")
    chat["messages"] = _messages(document)
    if tools := document.get("tools"):
        chat["tools"] = _tools(tools)
    if (choice := document.get("tool_choice")) is not None:
        chat["tool_choice"] = _tool_choice(choice)
    if (form := _text_format(document.get("text"))) is not None:
        chat["response_format"] = form
    return chat


def _includes_logprobs(document: Mapping[str, Any]) -> bool:
    included = document.get("include")
    if included is not None and type(included) is not list:
        raise BadMember("include", f"include must be an array, got {shown(included)}")
    return LOGPROBS in (included or ())


def _messages(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    instructions = document.get("instructions")
    if instructions is not None:
        if type(instructions) is not str:
            raise BadMember("instructions", f"instructions must be a text, got {shown(instructions)}")
        messages.append({"role": "system", "content": instructions})
    given = document.get("input")
    if type(given) is str and given:
        return [*messages, {"role": "user", "content": given}]
    if type(given) is not list or not given:
        raise BadMember("input", f"input must be a text or an array of items, not empty, got {shown(given)}")
    if len(given) > MAX_MESSAGES:
        raise BadMember("input", f"input has {len(given)} items, the limit is {MAX_MESSAGES}")
    for number, item in enumerate(given):
        name = f"input[{number}]"
        if type(item) is not dict:
            raise BadMember("input", f"{name} must be a JSON object, got {shown(item)}")
        kind = item.get("type") or "message"
        if kind not in _ITEMS:
            known = ", ".join(_ITEMS)
            raise BadMember("input", f"{name} has the type {shown(kind)}, expected one of {known}")
        _ITEMS[kind](name, item, messages)
    return messages


def _add_message(name: str, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    role = item.get("role")
    if type(role) is not str or role not in _ROLES:
        raise BadMember("input", f"{name}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
    messages.append({"role": _ROLES[role], "content": _content(f"{name}.content", item.get("content"))})


def _content(name: str, content: Any) -> str | list[dict[str, Any]]:
    """Return ``content`` of an item as that of a message: a text if it has no images."""
    if type(content) is str:
        return content
    if type(content) is not list:
        raise BadMember("input", f"{name} must be a text or an array of parts, got {shown(content)}")
    parts = [_part(f"{name}[{number}]", part) for number, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(name: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if type(part) is dict else None
    if kind in ("input_text", "output_text", "text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if type(text) is not str:
            raise BadMember("input", f"{name}.text must be a text, got {shown(text)}")
        return {"type": "text", "text": text}
    if kind == "input_image":
        url = part.get("image_url")
        if type(url) is not str:
            raise BadMember("input", f"{name}.image_url must be an address or a data URL: no files are stored")
        return {"type": "image_url", "image_url": {"url": url}}
    raise BadMember("input", f"{name} must be a part of type input_text, output_text or input_image, got {shown(part)}")


def _add_call(name: str, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add a call of a tool that the model has made: to the message before it, if that is the model's."""
    call_id, function, arguments = (_text(name, item, member) for member in ("call_id", "name", "arguments"))
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": None})
    call = {"id": call_id, "type": "function", "function": {"name": function, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


def _add_call_output(name: str, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    content = _content(f"{name}.output", item.get("output"))
    messages.append({"role": "tool", "tool_call_id": _text(name, item, "call_id"), "content": content})


def _text(name: str, item: dict[str, Any], member: str) -> str:
    value = item.get(member)
    if type(value) is not str:
        raise BadMember("input", f"{name}.{member} must be a text, got {shown(value)}")
    return value


def _skip(name: str, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Leave out the reasoning before an earlier answer."""


_ITEMS: dict[str, Callable[[str, dict[str, Any], list[dict[str, Any]]], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_call_output,
    "reasoning": _skip,
}


def _tools(tools: Any) -> list[dict[str, Any]]:
    if type(tools) is not list:
        raise BadMember("tools", f"tools must be an array, got {shown(tools)}")
    found = []
    for number, tool in enumerate(tools):
        if type(tool) is not dict or tool.get("type") != "function":
            kind = tool.get("type") if type(tool) is dict else tool
            raise BadMember(
                "tools", f"tools[{number}] must be of type function: the caller calls it, got {shown(kind)}"
            )
        found.append({"type": "function", "function": {key: each for key, each in tool.items() if key != "type"}})
    return found


def _tool_choice(choice: Any) -> Any:
    if type(choice) is dict and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice not in ("auto", "none", "required"):
        raise BadMember("tool_choice", f"tool_choice must be auto, none, required or a function, got {shown(choice)}")
    return choice


def _text_format(text: Any) -> dict[str, Any] | None:
    """Return ``response_format`` for the member ``text``; None for plain text."""
    if text is None:
        return None
    if type(text) is not dict:
        raise BadMember("text", f"text must be a JSON object, got {shown(text)}")
    form = text.get("format")
    if form is None:
        return None
    kind = form.get("type") if type(form) is dict else None
    if kind == "json_schema":
        return {"type": kind, "json_schema": {key: each for key, each in form.items() if key != "type"}}
    if kind not in ("text", "json_object"):
        raise BadMember("text", f"text.format.type must be text, json_object or json_schema, got {shown(kind)}")
    return {"type": kind}
