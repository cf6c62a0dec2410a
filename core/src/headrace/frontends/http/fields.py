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
    if raw.translate(None, _VALUE) != b"\r\n" * len(lines):
        raise Malformed("a header has a control character, or a line does not end in CRLF")
    fields: list[tuple[bytes, bytes]] = []
    by_name: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise Malformed("a header is a token, a colon and a value")
        value = value.strip(b" \t")
        fields.append((name, value))
        name = _known_key(name) if len(name) < _LONG else _key(name)
        by_name[name] = value if name not in by_name else by_name[name] + b", " + value
    return fields, by_name


def _key(name: bytes) -> bytes:
    """``name`` in lower case; raises `Malformed` if it is no token."""
    if not name or name.translate(None, TOKEN):
        raise Malformed("a header is a token, a colon and a value")
    return name.lower()


#: The same few names come again and again, whatever else changes from request to request.
_known_key = lru_cache(1024)(_key)
