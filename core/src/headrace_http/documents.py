"""JSON input, with Triton's tolerance and Triton's texts.

A document that cannot be read, or a member of the wrong type, is `Code.INTERNAL`, and so HTTP 500, as in Triton
(docs/spec/behaviours.md sections 0 and 1.3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, TypeVar

import orjson

from headrace.errors import Code, InvalidArgument
from headrace_http.structure import is_complete

T = TypeVar("T")

#: The maximum nesting of tensor data, less one.
MAX_DEPTH = 100

#: The start or end of a string, and the literal ``Inf``, which only rapidjson reads. A pattern of whole strings would
#: be quadratic for a string without an end.
_INF = re.compile(rb'\\.|"|Inf(?!inity)', re.DOTALL)


#: Texts of RapidJSON, Triton's parser, by those of orjson.
_TRITONS_WORDS = {
    "no digit after sign": "Invalid value.",
    "unexpected character, expected a JSON value": "Invalid value.",
    "no digit after decimal point": "Miss fraction part in number.",
    "no digit after exponent sign": "Miss exponent in number.",
    "unexpected character, expected a string key": "Missing a name for object member.",
    "unexpected character, expected ':' after key": "Missing a colon after a name of object member.",
    "unexpected character, expected ',' or '}'": "Missing a comma or '}' after an object member.",
    "unexpected character, expected ',' or ']'": "Missing a comma or ']' after an array element.",
    "unexpected content after document": "The document root must not be followed by other values.",
    "invalid escaped sequence in string": "Invalid escape character in string.",
    "no low surrogate in string": "The surrogate pair in string is invalid.",
}


def malformed(text: str) -> InvalidArgument:
    """Return an error about JSON: the caller's fault, with the code that Triton uses."""
    return InvalidArgument(text, Code.INTERNAL)


def too_deep() -> InvalidArgument:
    return InvalidArgument(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


def parse(body: memoryview, offset: int = 0) -> Any:
    """Return the document in ``body``. Accepts ``NaN``, ``Inf`` and ``Infinity``, with or without a sign.

    Raises `InvalidArgument`: malformed (500, with the position, counted from ``offset``), or nested too deep for a
    parser (400).
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "depth limit" in error.msg or "ecursion" in error.msg:
            raise _deep_or_open(body, offset) from None
        if "infinity" in error.msg:
            raise unreadable("Number too big to be stored in double.", offset + error.pos) from None
        raw = bytes(body)
        if b"NaN" in raw or b"Inf" in raw:
            return _parse_literals(raw, offset)
        if not raw.strip():
            raise unreadable("The document is empty.", offset) from None
        text, position = _tritons_words(error)
        raise unreadable(text, offset + len(error.doc[:position].encode())) from None


def parse_object(body: memoryview) -> dict[str, Any]:
    """Return the object in ``body``, nested at most `MAX_DEPTH` levels; ``{}`` for an empty body."""
    if not body.nbytes:
        return {}
    document = parse(body)
    check_depth(document)
    return as_object(document, None)


def checked(document: Any) -> Any:
    """Return ``document``, nested at most `MAX_DEPTH` levels. Raises `InvalidArgument`."""
    check_depth(document)
    return document


def check_depth(document: Any) -> None:
    """Raise if the document is nested deeper than `MAX_DEPTH`. Linear time and memory."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise too_deep()


def as_object(value: Any, field: str | None) -> dict[str, Any]:
    if type(value) is not dict:
        raise wrong_type(field, "object", "object")
    return value


def as_array(value: Any, field: str | None) -> list[Any]:
    if type(value) is not list:
        raise wrong_type(field, "array", "array")
    return value


def as_string(value: Any, field: str | None) -> str:
    if type(value) is not str:
        raise wrong_type(field, "string", "string")
    return value


def as_boolean(value: Any, field: str | None) -> bool:
    if type(value) is not bool:
        raise wrong_type(field, "boolean", "boolean")
    return value


def as_unsigned(value: Any, field: str | None) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise wrong_type(field, "unsigned-integer", "unsigned-integer")
    return value


def as_unicode(value: Any, field: str | None) -> str:
    """`as_string` of a string that is sent back. Raises for half of a surrogate pair, too."""
    text = as_string(value, field)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise malformed(f"{_prefix(field)}half of a surrogate pair") from None
    return text


#: The reader of each type of value.
_READERS: dict[type, Callable[[Any, str | None], Any]] = {
    bool: as_boolean,
    int: as_unsigned,
    str: as_unicode,
    list: as_array,
    dict: as_object,
}


def read_value(value: Any, kind: type[T], field: str | None) -> T:
    """Return ``value`` if it is of the type ``kind``: bool, int (unsigned, 64 bits), str (Unicode), list or dict.

    Raises `InvalidArgument`, which names ``field`` if there is one.
    """
    _READERS[kind](value, field)
    return value  # type: ignore[no-any-return]


def member(container: dict[str, Any], field: str) -> Any:
    """Return ``container[field]``. Raises if it is missing."""
    try:
        return container[field]
    except KeyError:
        text = f"Unable to parse '{field}': attempt to access non-existing object member '{field}'"
        raise malformed(text) from None


def wrong_type(field: str | None, not_a: str, as_a: str) -> InvalidArgument:
    return malformed(f"{_prefix(field)}attempt to access JSON non-{not_a} as {as_a}")


def _prefix(field: str | None) -> str:
    return f"Unable to parse '{field}': " if field else ""


def _children(node: Any) -> Iterable[Any]:
    values = node.values() if type(node) is dict else node if type(node) is list else ()
    return [value for value in values if type(value) in (dict, list)]


def _deep_or_open(body: memoryview, offset: int) -> InvalidArgument:
    """Return the error for ``body``: too deep, or incomplete, which is reported first, as in Triton."""
    return too_deep() if is_complete(body) else unreadable("Invalid value.", offset + body.nbytes)


def _tritons_words(error: orjson.JSONDecodeError) -> tuple[str, int]:
    """Return the text of Triton's parser for ``error``, and the position; orjson's text if Triton has several."""
    position = error.pos
    if found := re.fullmatch("invalid literal, expected '([a-z]+)'", error.msg):
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(found[1], error.doc[position:], strict=False))
        return "Invalid value.", position + sum(1 for _ in alike)
    if error.msg.startswith("trailing comma"):
        is_object = error.doc[position + 1 :].lstrip().startswith("}")
        return "Missing a name for object member." if is_object else "Invalid value.", position + 1
    return _TRITONS_WORDS.get(error.msg, error.msg), position


def _parse_literals(raw: bytes, offset: int) -> Any:
    try:
        return json.loads(_spell_out(raw) if b"Inf" in raw else raw)
    except RecursionError:
        raise _deep_or_open(memoryview(raw), offset) from None
    except json.JSONDecodeError as error:
        raise unreadable(error.msg, offset + error.pos) from None
    except ValueError as error:  # not UTF-8, or an integer of thousands of digits
        raise unreadable(str(error), offset) from None


def _spell_out(raw: bytes) -> bytes:
    """Return ``raw`` with ``Infinity`` for each ``Inf`` outside a string. Linear time."""
    parts, end, in_string = list[bytes](), 0, False
    for found in _INF.finditer(raw):
        if found[0] == b'"':
            in_string = not in_string
        elif found[0] == b"Inf" and not in_string:
            parts += (raw[end : found.start()], b"Infinity")
            end = found.end()
    return b"".join((*parts, raw[end:]))


def unreadable(text: str, position: int) -> InvalidArgument:
    return malformed(f"failed to parse the request JSON buffer: {text} at {position}")
