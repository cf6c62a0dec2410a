"""The member ``messages`` of a chat: its form is checked, and made the same for all models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_openai.body_members import members, objects, one_of, shown, text
from headrace_openai.openai_errors import BadMember

MAX_MESSAGES = 4096
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PARTS = ("text", "refusal", "image_url", "input_audio", "file", "video_url")


def read_messages(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages: content that is only text as a string, and the role ``developer`` as ``system``.

    Templates have no other forms. Raises `BadMember`.
    """
    given = objects(document, "messages", MAX_MESSAGES)
    if not given:
        raise BadMember("messages", "messages must be an array with at least one message")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(given)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = one_of(message.get("role"), f"{where}.role", _ROLES)
    found = {name: value for name, value in message.items() if value is not None}
    found["role"] = "system" if role == "developer" else role
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise BadMember(f"{where}.content", f"{where}.content must be a string or an array of parts, got nothing")
        found["content"] = ""
    elif type(content) is list:
        found["content"] = _content(content, f"{where}.content")
    elif type(content) is not str:
        raise BadMember(
            f"{where}.content", f"{where}.content must be a string or an array of parts, got {shown(content)}"
        )
    if "tool_calls" in found:
        found["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]")
            for place, call in enumerate(objects(found, "tool_calls", MAX_MESSAGES))
        ]
    return found


def _content(parts: Sequence[Any], where: str) -> str | list[Any]:
    if len(parts) > MAX_MESSAGES:
        raise BadMember(where, f"{where} has {len(parts)} parts, the limit is {MAX_MESSAGES}")
    texts = []
    for place, part in enumerate(parts):
        here = f"{where}[{place}]"
        if type(part) is not dict:
            raise BadMember(here, f"{here} must be an object, got {shown(part)}")
        kind = one_of(part.get("type"), f"{here}.type", _PARTS)
        if kind in ("text", "refusal"):
            texts.append(text(part, kind, f"{here}.{kind}"))
        elif kind == "image_url":
            _check_address(text(members(part, "image_url", f"{here}.image_url"), "url", f"{here}.image_url.url"), here)
    return "\n".join(texts) if len(texts) == len(parts) else list(parts)


def _check_address(address: str, where: str) -> None:
    """Refuse an address that would have to be fetched: it may be that of this machine, or of its network."""
    if not address.startswith("data:"):
        raise BadMember(
            f"{where}.image_url.url",
            f"{where}.image_url.url must be a data URL: addresses are fetched from --openai-image-hosts only",
        )


def _call(call: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    function = members(call, "function", f"{where}.function")
    text(function, "name", f"{where}.function.name")
    return call


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the images of all messages, as base64."""
    parts = [part for message in messages if type(message["content"]) is list for part in message["content"]]
    addresses = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [address.partition(",")[2].encode("ascii", "replace") for address in addresses]
