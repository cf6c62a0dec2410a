"""Finds, splits and joins strings in the wire form of the protocol, fast enough for millions of them.

In wire form, each string is its length, a little-endian uint32, followed by its bytes (docs/spec/behaviours.md section
3.1). Each length gives the place of the next one, so finding all takes one step per string, which is slow in Python.
Where the bytes look like short strings, NumPy guesses the places of a whole window; places are accepted as long as
each leads to the next.
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
#: The bytes in which places are guessed at a time: small enough for the CPU's cache, and to bound the memory used.
_WINDOW = 32 * 1024
#: After a guess that found too little, this many bytes are walked string by string.
_WALK = 4 * _WINDOW
#: In fewer bytes than this, nothing is guessed.
_SMALL = 1024
#: For fewer strings than this, a step for each is faster than one call for all.
_FEW = 64
#: A guess that finds fewer strings than this is slower than walking.
_WORTH = 256
#: The number of strings that are split with one format.
_CUT = 4096


def find(buffer: memoryview) -> Offsets:
    """Return the start of each whole string in ``buffer``, and the end of the last one: i64[strings + 1].

    The buffer is well-formed if that end is the end of the buffer.
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
    """Return the strings at the ``offsets`` that `find` returned. Copies each."""
    if len(offsets) <= _FEW:
        return [bytes(buffer[begin + 4 : end]) for begin, end in pairwise(offsets.tolist())]
    lengths, items = (np.diff(offsets) - 4).tolist(), list[bytes]()
    cuts = {length: f"4x{length}s" for length in set(lengths)}
    position = 0
    for first in range(0, len(lengths), _CUT):
        # One call for many strings takes half the time of a slice for each.
        cut = Struct("<" + "".join([cuts[length] for length in lengths[first : first + _CUT]]))
        items += cut.unpack_from(buffer, position)
        position += cut.size
    return items


def join(items: Sequence[bytes]) -> tuple[Buffer, Offsets | None]:
    """Return ``items`` in wire form, and their offsets, or None for few items: `find` is as fast. Copies each once."""
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
    """Return the offsets of strings that take ``sizes`` bytes each in wire form, and the end of the last one."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _walk(buffer: memoryview, position: int, stop: int) -> tuple[list[int], int]:
    """Return the starts of the whole strings that begin at ``position`` or later, before ``stop``; and their end."""
    unpack, places = _LENGTH.unpack_from, list[int]()
    stop = min(stop, buffer.nbytes - 3)
    while position < stop:
        places.append(position)
        position += 4 + unpack(buffer, position)[0]
    if position > buffer.nbytes:
        position = places.pop()
    return places, position


def _guess(buffer: memoryview, begin: int) -> tuple[Offsets, int]:
    """Return the starts of strings of less than 256 bytes from ``begin`` on, as far as guessing finds them; and their
    end.

    The length of such a string is one byte and three zeros. A longer run of zeros consists of empty strings: its last
    three zeros belong to a length, and so does each fourth one before. Zeros inside a string break that rule. So starts
    are only accepted as long as each leads to the next.
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
    """Return how many of ``places`` form a chain from the first byte of ``window``, each leading to the next."""
    if not len(places) or places[0]:
        return 0
    wrong = np.flatnonzero(places[:-1] + 4 + window[places[:-1]] != places[1:])
    return int(wrong[0]) + 1 if len(wrong) else len(places)


def _fourths(places: Offsets) -> Offsets:
    """Return, of each run of adjacent ``places``, the last one and every fourth one before it."""
    last = np.append(np.flatnonzero(np.diff(places) > 1), len(places) - 1)
    before = np.repeat(places[last], np.diff(last, prepend=-1)) - places
    fourths: Offsets = places[before % 4 == 0]
    return fourths
