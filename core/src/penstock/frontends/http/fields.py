"""Header and trailer fields, by RFC 9112, 5: a name, a colon, a value, CRLF. Nothing else is taken for one."""

from __future__ import annotations

from functools import lru_cache

#: What a token consists of (RFC 9110, 5.6.2).
TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: What a value consists of: blanks, what is visible, and bytes beyond ASCII.
_VALUE = bytes([9, *range(32, 127), *range(128, 256)])
_LONG = 128


class Malformed(Exception):
    """``str(error)`` says which rule was broken, ``status`` how that is answered."""

    def __init__(self, rule: str, status: int = 400) -> None:
        super().__init__(rule)
        self.status = status


def read_fields(raw: bytes, most: int) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
    """The lines of ``raw``, each of which ends in CRLF: names and values, and values by names in lower case.

    Values are without the blanks around them, and those of a repeated name joined by commas. Raises `Malformed` for
    what is no field, and when there are more than ``most``.
    """
    lines = raw.split(b"\r\n")
    if lines.pop():
        raise Malformed("a line does not end in CRLF")
    if len(lines) > most:
        raise Malformed(f"more than {most} headers", 431)
    fields: list[tuple[bytes, bytes]] = []
    by_name: dict[bytes, bytes] = {}
    for line in lines:
        field, name = _short_field(line) if len(line) < _LONG else _field(line)
        fields.append(field)
        by_name[name] = field[1] if name not in by_name else by_name[name] + b", " + field[1]
    return fields, by_name


def _field(line: bytes) -> tuple[tuple[bytes, bytes], bytes]:
    """Name and value, and the name in lower case."""
    name, colon, value = line.partition(b":")
    if not colon or not name or name.translate(None, TOKEN):
        raise Malformed("a header is a token, a colon and a value")
    if value.translate(None, _VALUE):
        raise Malformed("a header has a control character, or a line does not end in CRLF")
    return (name, value.strip(b" \t")), name.lower()


#: The same few lines come again and again, whatever else changes from request to request.
_short_field = lru_cache(1024)(_field)
