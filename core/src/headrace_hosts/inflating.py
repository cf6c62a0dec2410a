"""Decompression of requests within limits (docs/spec/behaviours.md sections 1.3 and 2.6).

Blocks: about 3 ms per MiB, without the interpreter's lock.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.off_loop import TooLargeForLoop

#: The size of input and output per zlib call. zlib copies its unread input at every call.
_STEP_BYTES = 256 * 1024

#: Returns memory for that many bytes. May raise a `HeadraceError`.
Take: TypeAlias = Callable[[int], npt.NDArray[np.uint8]]


def new_memory(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory that counts nowhere."""
    return np.empty(size_bytes, np.uint8)


class TooLarge(Exception):
    """The decompressed data has at least ``size_bytes``, which is over the limit."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


class CorruptData(Exception):
    """The data cannot be decompressed; the text says why."""

    def __init__(self, text: str, is_truncated: bool = False) -> None:
        super().__init__(text)
        self.is_truncated = is_truncated


def inflate(data: memoryview, wbits: int, limit: int, loop_limit_bytes: int, take: Take = new_memory) -> memoryview:
    """Return ``data`` decompressed, in one piece of memory, of ``take`` if it has more than 256 KiB.

    Raises `TooLargeForLoop` beyond ``loop_limit_bytes`` of input or output, `TooLarge` beyond ``limit``, and
    `CorruptData`.
    """
    if data.nbytes > loop_limit_bytes:
        raise TooLargeForLoop
    unpacker, unpacked = zlib.decompressobj(wbits), _Growing(take)
    for at in range(0, data.nbytes, _STEP_BYTES):
        rest: bytes | memoryview = data[at : at + _STEP_BYTES]
        while len(rest) and not unpacker.eof:
            try:
                piece = unpacker.decompress(rest, _STEP_BYTES)
            except zlib.error as error:
                raise CorruptData(f"is malformed: {error}") from None
            rest = unpacker.unconsumed_tail
            if unpacked.size + len(piece) > limit:
                raise TooLarge(unpacked.size + len(piece))
            if unpacked.size + len(piece) > loop_limit_bytes:
                raise TooLargeForLoop
            unpacked.append(piece)
    while not unpacker.eof:  # the output that zlib still holds
        piece = unpacker.decompress(b"", _STEP_BYTES)
        if not piece:
            raise CorruptData("is truncated", True)
        if unpacked.size + len(piece) > limit:
            raise TooLarge(unpacked.size + len(piece))
        unpacked.append(piece)
    return unpacked.content()


class _Growing:
    """One piece of memory that doubles when it is full. A large one is mapped by itself and freed at once."""

    __slots__ = ("_memory", "_take", "size")

    def __init__(self, take: Take) -> None:
        self._memory, self._take = new_memory(_STEP_BYTES), take
        self.size = 0

    def append(self, piece: bytes) -> None:
        end = self.size + len(piece)
        if end > len(self._memory):
            larger = self._take(max(end, 2 * len(self._memory)))
            larger[: self.size] = self._memory[: self.size]
            self._memory = larger
        self._memory[self.size : end] = np.frombuffer(piece, np.uint8)
        self.size = end

    def content(self) -> memoryview:
        return self._memory.data[: self.size]
