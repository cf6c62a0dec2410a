"""Members of the body: read with their type and range. All functions raise `BadMember` with the name, value and rule.

A member that is null counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

import headrace_llm
from headrace import InvalidArgument
from headrace_llm import depth_of
from headrace_openai.openai_errors import BadMember

_MOST_DEPTH = 64
#: Characters that are encoded in one piece, with the interpreter's lock held.
_SLICE = 64 * 1024


def flag(document: Mapping[str, Any], name: str) -> bool:
    """Return the boolean ``name``; False if it is missing."""
    value = document.get(name)
    if value is None:
        return False
    if type(value) is not bool:
        raise BadMember(name, f"{name} must be true or false, got {shown(value)}")
    return value


def whole(document: Mapping[str, Any], name: str, least: int, most: int, default: int) -> int:
    """Return the whole number ``name``; ``default`` if it is missing."""
    value = document.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise BadMember(name, f"{name} must be a whole number from {least} to {most}, got {shown(value)}")
    return value


def objects(document: Mapping[str, Any], name: str, most: int) -> Sequence[dict[str, Any]]:
    """Return the array of objects ``name``; empty if it is missing."""
    value = document.get(name)
    if value is None:
        return ()
    if type(value) is not list:
        raise BadMember(name, f"{name} must be an array, got {shown(value)}")
    if len(value) > most:
        raise BadMember(name, f"{name} has {len(value)} members, the limit is {most}")
    for place, each in enumerate(value):
        if type(each) is not dict:
            raise BadMember(f"{name}[{place}]", f"{name}[{place}] must be an object, got {shown(each)}")
    return value


def members(container: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Return the object ``name`` of ``container``, which is at ``where`` in the body; empty if it is missing."""
    value = container.get(name)
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadMember(where, f"{where} must be an object, got {shown(value)}")
    return value


def text(container: Mapping[str, Any], name: str, where: str) -> str:
    """Return the string ``name`` of ``container``, which is at ``where`` in the body."""
    value = container.get(name)
    if type(value) is not str:
        raise BadMember(where, f"{where} must be a string, got {shown(value)}")
    return value


def encoded(value: Any, where: str) -> bytes:
    """Return ``value`` as JSON, or a string as UTF-8."""
    return _encoded(value, where, orjson.dumps)


def encoded_in_parts(value: Any, where: str) -> bytes:
    """Return what `encoded` does, for a ``value`` with large texts. Other threads run between two parts of a text."""
    return _encoded(value, where, lambda value: b"".join(_json_parts(value)))


def _encoded(value: Any, where: str, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        if type(value) is str:
            return value.encode() if len(value) <= _SLICE else b"".join([part.encode() for part in _slices(value)])
        if (depth := depth_of(value)) > _MOST_DEPTH:
            raise BadMember(where, f"{where} is nested {depth} levels deep, the limit is {_MOST_DEPTH}")
        return dumps(value)
    except (UnicodeEncodeError, TypeError):  # JSON with NaN is read by a parser that lets it pass
        raise BadMember(where, f"{where} has half of a surrogate pair, which is no text") from None


def _slices(text: str) -> Iterator[str]:
    """Yield ``text`` in parts."""
    for begin in range(0, len(text), _SLICE):
        yield text[begin : begin + _SLICE]


def _json_parts(value: Any) -> Iterator[bytes]:
    """Yield the JSON of ``value``, in parts."""
    if type(value) is str and len(value) > _SLICE:
        yield b'"'
        yield from (orjson.dumps(part)[1:-1] for part in _slices(value))
        yield b'"'
    elif type(value) is list and value:
        for place, each in enumerate(value):
            yield b"," if place else b"["
            yield from _json_parts(each)
        yield b"]"
    elif type(value) is dict and value:
        for place, (name, each) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if place else b"{", orjson.dumps(name))
            yield from _json_parts(each)
        yield b"}"
    else:
        yield orjson.dumps(value)


def one_of(value: Any, where: str, choices: Sequence[str]) -> str:
    """Return ``value``, one of ``choices``."""
    if type(value) is not str or value not in choices:
        raise BadMember(where, f"{where} must be one of {', '.join(choices)}, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return ``value`` for an error: one line of at most 100 characters."""
    if value is None:
        return "nothing"
    return headrace_llm.shown(value)


def named(error: InvalidArgument, names: Sequence[str]) -> BadMember:
    """Return ``error`` with the member that its text begins with, one of ``names``."""
    first = error.message.split(" ")[0].split(".")[0]
    return BadMember(first if first in names else "", error.message)
