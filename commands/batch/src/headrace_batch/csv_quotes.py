"""Finds a quote in a CSV file that is never closed. Arrow would read the rest of the file as one value."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

_QUOTES = re.compile(b'"+')
#: The bytes before a quote that opens a value. Any other quote outside of a quoted value is a character of its value.
_BORDERS = b",\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COUNTED_BYTES = 1 << 20


def line_of_open_quote(path: Path) -> int:
    """Return the line, from 1, of the quote that is not closed at the end of ``path``. 0 if there is none."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            opened = _place_of_open_quote(text)
            return 0 if opened is None else 1 + _line_ends(text, opened)


def _place_of_open_quote(text: mmap.mmap) -> int | None:
    """In a quoted value, two quotes are one character, and a single one ends the value."""
    opened: int | None = None
    for quotes in _QUOTES.finditer(text):
        place, count = quotes.start(), quotes.end() - quotes.start()
        if opened is None:
            if place and text[place - 1] not in _BORDERS and not (place == 3 and text[:3] == _BYTE_ORDER_MARK):
                continue
            opened, count = place, count - 1
        if count % 2:
            opened = None
    return opened


def _line_ends(text: mmap.mmap, end: int) -> int:
    return sum(text[at : min(at + _COUNTED_BYTES, end)].count(b"\n") for at in range(0, end, _COUNTED_BYTES))
