"""The data of server-sent events: JSON in one line, whatever a client takes for the end of a line."""

from __future__ import annotations

from typing import Any

import orjson

#: Characters at which clients split lines that use `str.splitlines` or its like. JSON escapes the others.
_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


def event_line(value: Any) -> bytes:
    """Return ``value`` as JSON without a character that ends a line."""
    line = orjson.dumps(value)
    if not line.isascii():
        for raw, escaped in _BREAKS.items():
            line = line.replace(raw, escaped)
    return line
