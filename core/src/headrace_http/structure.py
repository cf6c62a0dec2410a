"""The structure of a JSON document, found by NumPy in windows, without parsing it.

A parser holds the interpreter's lock for the whole document. NumPy releases it, and a window is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.off_loop import SLICE_BYTES

Mask: TypeAlias = "npt.NDArray[np.bool_]"
Depths: TypeAlias = "npt.NDArray[np.int32]"

_QUOTE, _BACKSLASH, _COMMA, _OPENED, _CLOSED, _ZERO, _UNICODE = (ord(each) for each in '"\\,{}0u')
#: ``[`` and ``]`` differ from ``{`` and ``}`` in this bit; no other byte does.
_BRACE_BIT = 0x20
#: Bytes that most windows of numbers lack.
_MARKS = (b'"', b"\\", b"[", b"]", b"{", b"}")


class Window(NamedTuple):
    """``content`` u8[n] of a document from byte ``at`` on.

    ``inside`` bool[n]: a string is open after the byte. ``depth`` i32[n]: the number of open brackets after the byte.
    """

    at: int
    content: npt.NDArray[np.uint8]
    inside: Mask
    depth: Depths
    #: True if it has neither strings nor brackets, like most of a tensor's numbers.
    is_plain: bool = False

    def crossings(self, depth: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return where brackets open from ``depth`` to one more, and where such brackets close; the two alternate."""
        if self.is_plain or int(self.depth.max()) <= depth or int(self.depth.min()) > depth + 1:
            nothing = np.empty(0, np.intp)
            return nothing, nothing
        folded = self.content | _BRACE_BIT
        outside = ~self.inside
        opened = np.flatnonzero((folded == _OPENED) & (self.depth == depth + 1) & outside)
        closed = np.flatnonzero((folded == _CLOSED) & (self.depth == depth) & outside)
        return opened, closed

    def last_comma(self, begin: int) -> int:
        """Return the place of the last comma outside strings, from ``begin`` on; -1 if there is none."""
        if self.is_plain:
            return self.content.tobytes().rfind(b",", begin)
        commas = np.flatnonzero((self.content[begin:] == _COMMA) & ~self.inside[begin:])
        return begin + int(commas[-1]) if len(commas) else -1

    def first_comma(self, begin: int) -> int:
        """Return the place of the first such comma; -1 if there is none."""
        if self.is_plain:
            return self.content.tobytes().find(b",", begin)
        commas = (self.content[begin:] == _COMMA) & ~self.inside[begin:]
        return begin + int(np.argmax(commas)) if commas.any() else -1


def windows(document: memoryview) -> Iterator[Window]:
    """Yield the windows of ``document``; about 10 ns per byte."""
    content = np.frombuffer(document, np.uint8)
    in_string = is_escaped = False
    depth = 0
    for at in range(0, len(content), SLICE_BYTES):
        part = content[at : at + SLICE_BYTES]
        if not in_string and not any(map(part.tobytes().__contains__, _MARKS)):
            is_escaped = False
            yield Window(at, part, np.broadcast_to(False, len(part)), np.broadcast_to(np.int32(depth), len(part)), True)
            continue
        quotes = part == _QUOTE
        backslashes = part == _BACKSLASH
        if is_escaped or backslashes.any():
            escaped, is_escaped = _escaped(backslashes, is_escaped)
            quotes &= ~escaped
        inside = _parity(quotes, in_string)
        in_string = bool(inside[-1])
        folded = part | _BRACE_BIT
        steps = ((folded == _OPENED) & ~inside).view(np.int8) - ((folded == _CLOSED) & ~inside).view(np.int8)
        depths = np.cumsum(steps, dtype=np.int32)
        depths += depth
        depth = int(depths[-1])
        yield Window(at, part, inside, depths)


def safe_cuts(text: memoryview) -> Iterator[memoryview]:
    """Yield ``text``, the inside of a JSON string, in parts that are valid insides, too."""
    begin = 0
    while len(text) - begin > SLICE_BYTES:
        part = np.frombuffer(text[begin : begin + SLICE_BYTES], np.uint8)
        escaped, _ = _escaped(part == _BACKSLASH, False)
        for end in range(len(part) - 1, len(part) - 64, -1):
            if _is_safe(part, escaped, end):
                break
        yield text[begin : begin + end]
        begin += end
    yield text[begin:]


def _is_safe(part: npt.NDArray[np.uint8], escaped: Mask, end: int) -> bool:
    """True if ``part[:end]`` ends neither in a character, nor in an escape, nor in a surrogate pair."""
    if escaped[end] or part[end] & 0xC0 == 0x80:
        return False
    for at in range(end - 5, end):
        if escaped[at] and part[at] == _UNICODE and at + 4 >= end:
            return False
    is_escape = escaped[end - 5] and part[end - 5] == _UNICODE
    return not (is_escape and bytes(part[end - 4 : end - 2]).lower() in (b"d8", b"d9", b"da", b"db"))


def blank_strings(document: memoryview) -> bytes:
    """Return ``document`` with a zero for each byte of its strings, with the quotes."""
    parts = list[bytes]()
    for window in windows(document):
        blank = window.content.copy()
        blank[window.inside | (blank == _QUOTE)] = _ZERO
        parts.append(blank.tobytes())
    return b"".join(parts)


def is_complete(document: memoryview) -> bool:
    """True if every bracket and every string of ``document`` is closed."""
    window = None
    for window in windows(document):
        if int(window.depth.min()) < 0:
            return False
    return window is None or not (window.depth[-1] or window.inside[-1])


def _parity(quotes: Mask, in_string: bool) -> Mask:
    count = np.cumsum(quotes, dtype=np.uint8)  # wraps around, which keeps the last bit
    count += in_string
    count &= 1
    return count.view(np.bool_)


def _escaped(backslashes: Mask, is_first_escaped: bool) -> tuple[Mask, bool]:
    """Return which bytes are escaped by a backslash, and whether the next byte after them is.

    In a row of backslashes, every other one counts, from the first one that is not escaped.
    """
    escaped = np.zeros(len(backslashes) + 1, np.bool_)
    escaped[0] = is_first_escaped
    places = np.flatnonzero(backslashes)
    if is_first_escaped and len(places) and places[0] == 0:
        places = places[1:]
    if len(places):
        begins = np.where(np.diff(places, prepend=-2) > 1, places, 0)
        counting = places[(places - np.maximum.accumulate(begins)) % 2 == 0]
        escaped[counting + 1] = True
    return escaped[:-1], bool(escaped[-1])
