"""Pinned memory for copies between the host and GPUs: reused, and bounded for the process.

A GPU reads and writes pinned memory without the CPU. Other memory is first copied by the CPU, while a thread waits.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

#: The smallest block. Larger ones have the next power of 2.
_LEAST_BYTES = 1 << 12


class PinnedArrays:
    """Arrays in pinned memory. ``allocate(n)`` returns ``n`` bytes of it, u8[n].

    Blocks are kept for reuse, at most ``limit_bytes`` together. An array beyond that is in ordinary memory. Any thread.
    """

    def __init__(self, limit_bytes: int, allocate: Callable[[int], npt.NDArray[np.uint8]]) -> None:
        self._left, self._allocate = limit_bytes, allocate
        self._lock = threading.Lock()
        #: The free blocks by size. Finalizers add to it, so it has no lock.
        self._free: defaultdict[int, deque[npt.NDArray[np.uint8]]] = defaultdict(deque)

    def array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an uninitialized array. Its memory is reused when its last view is released."""
        count = prod(shape) * dtype.itemsize
        size = max(_LEAST_BYTES, 1 << (count - 1).bit_length()) if count else 0
        block = self._block(size) if size else None
        if block is None:
            return np.empty(shape, dtype)
        return np.asarray(_Lease(block, self._free[size]))[:count].view(dtype).reshape(shape)

    def _block(self, size: int) -> npt.NDArray[np.uint8] | None:
        try:
            return self._free[size].pop()
        except IndexError:
            with self._lock:
                if size > self._left:
                    return None
                self._left -= size
        try:
            return self._allocate(size)
        except RuntimeError:  # the system has no more
            self._left = 0
            return None


class _Lease:
    """The base of an array on ``block``. It returns the block to ``free`` when the last view is released."""

    __slots__ = ("_block", "_free")

    def __init__(self, block: npt.NDArray[np.uint8], free: deque[npt.NDArray[np.uint8]]) -> None:
        self._block, self._free = block, free

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._block.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._block)
