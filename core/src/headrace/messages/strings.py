"""Strings in the wire form of the protocol: found, cut and joined by the million.

In wire form each string is its length, a little-endian uint32, and then its bytes (docs/spec/behaviours.md
section 3.1). The places of the lengths follow from one another, so finding them means a step per
string. Steps of Python are slow; where the bytes look like short strings NumPy guesses the places of
a whole window, and those are taken that lead from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from struct import Struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Offsets: TypeAlias = "npt.NDArray[np.int64]"

_LENGTH = Struct("<I")
#: Bytes in which places are guessed at a time: they stay in the cache, and bound what is held.
_WINDOW = 32 * 1024
#: Bytes to go in steps after a guess that was not worth it.
_WALK = 4 * _WINDOW
#: Bytes below which nothing is guessed.
_SMALL = 1024
#: Strings below which a step for each is faster than one call for all.
_FEW = 64
#: Strings that one guess must find to be no slower than steps.
_WORTH = 256
#: Strings that are cut with one format.
_CUT = 4096


def find(buffer: memoryview) -> Offsets:
    """Where each whole string in ``buffer`` begins, and where the last of them ends: i64[strings + 1].

    The buffer is well formed if that end is its own.
    """
    if buffer.nbytes < _SMALL:
        places, end = _walk(buffer, 0, _SMALL)
        return np.array([*places, end], np.int64)
    parts, position, end = list[Offsets](), -1, 0
    while end > position:
        position = end
        guessed, end = _guess(buffer, position)
        walked, end = _walk(buffer, end, end + (1 if len(guessed) >= _WORTH else _WALK))
        parts += (guessed, np.asarray(walked, np.int64))
    return np.concatenate([*parts, np.array([end])])


def split(buffer: memoryview, offsets: Offsets) -> list[bytes]:
    """The strings whose places `find` has found. Copies each."""
    if len(offsets) <= _FEW:
        return [bytes(buffer[begin + 4 : end]) for begin, end in pairwise(offsets.tolist())]
    lengths, items = (np.diff(offsets) - 4).tolist(), list[bytes]()
    cuts = {length: f"4x{length}s" for length in set(lengths)}
    position = 0
    for first in range(0, len(lengths), _CUT):
        # One call that cuts many takes half the time of a slice for each.
        cut = Struct("<" + "".join([cuts[length] for length in lengths[first : first + _CUT]]))
        items += cut.unpack_from(buffer, position)
        position += cut.size
    return items


def join(items: Sequence[bytes]) -> tuple[Buffer, Offsets | None]:
    """``items`` in wire form, and their places unless they are as quickly found. Copies each once."""
    if len(items) < _FEW:
        pack = _LENGTH.pack
        return b"".join([part for item in items for part in (pack(len(item)), item)]), None
    lengths = np.fromiter(map(len, items), "<u4", len(items))
    offsets = ends(lengths.astype(np.int64) + 4)
    buffer = bytearray(4).join([b"", *items])  # four bytes before each, for its length
    raw, words = np.frombuffer(buffer, np.uint8), lengths.view(np.uint8).reshape(-1, 4)
    for place in range((int(lengths.max()).bit_length() + 7) // 8):
        raw[offsets[:-1] + place] = words[:, place]
    return buffer, offsets


def ends(sizes: Offsets) -> Offsets:
    """Where strings that take ``sizes`` bytes in wire form begin, and where the last ends."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _walk(buffer: memoryview, position: int, stop: int) -> tuple[list[int], int]:
    """The places of the whole strings that begin from ``position`` to before ``stop``, and their end."""
    unpack, places = _LENGTH.unpack_from, list[int]()
    stop = min(stop, buffer.nbytes - 3)
    while position < stop:
        places.append(position)
        position += 4 + unpack(buffer, position)[0]
    if position > buffer.nbytes:
        position = places.pop()
    return places, position


def _guess(buffer: memoryview, begin: int) -> tuple[Offsets, int]:
    """The places of strings below 256 bytes from ``begin`` on, as far as they are plain, and their end.

    The length of such a string is a byte before three zeros. Where there are more zeros, as empty
    strings have them, the last three belong to a length, and so does each fourth before. Zeros in
    a string can make that wrong: places are right as far as each leads to the next.
    """
    if bytes(buffer[begin + 1 : begin + 4]) != b"\0\0\0":
        return np.empty(0, np.int64), begin
    window = np.frombuffer(buffer, np.uint8, min(_WINDOW, buffer.nbytes - begin), begin)
    zero = window == 0
    places = np.flatnonzero(zero[1:-2] & zero[2:-1] & zero[3:])
    count = _leading(window, places)
    if count < len(places) >= _FEW:
        places = _fourths(places)
        count = _leading(window, places)
    if not count:
        return places[:0], begin
    end = begin + int(places[count - 1]) + 4 + int(window[places[count - 1]])
    if end > buffer.nbytes:
        return places[:0], begin
    return places[:count] + begin, end


def _leading(window: npt.NDArray[np.uint8], places: Offsets) -> int:
    """How many of ``places`` lead from the first byte of ``window`` to one another."""
    if not len(places) or places[0]:
        return 0
    wrong = np.flatnonzero(places[:-1] + 4 + window[places[:-1]] != places[1:])
    return int(wrong[0]) + 1 if len(wrong) else len(places)


def _fourths(places: Offsets) -> Offsets:
    """Of ``places`` side by side the last, and every fourth before it."""
    last = np.append(np.flatnonzero(np.diff(places) > 1), len(places) - 1)
    before = np.repeat(places[last], np.diff(last, prepend=-1)) - places
    fourths: Offsets = places[before % 4 == 0]
    return fourths
