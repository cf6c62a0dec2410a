"""Memory for large requests. If memory is short when it is freed, the system gets it back at once.

glibc keeps freed memory for later requests. Smaller ones then take parts of it, and the next large one gets new memory:
the process holds twice as much as it counts.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

#: Smaller memory stays with glibc: a system call for each would cost more than it saves.
_LEAST_BYTES = 32 << 10


def returned_memory(size_bytes: int, is_short: Callable[[], bool]) -> npt.NDArray[np.uint8]:
    """Return memory of ``size_bytes``, which is not counted.

    If ``is_short`` returns True when it is freed, the system gets its pages back: from 32 KiB on, and on Linux only.
    """
    if size_bytes < _LEAST_BYTES:
        return np.empty(size_bytes, np.uint8)
    memory: npt.NDArray[np.uint8] = (owner := _ReturnedMemory(size_bytes, np.uint8))
    owner.is_short = is_short
    return memory


def discard(memory: npt.NDArray[np.uint8]) -> None:
    """Return the pages within ``memory`` to the system. It stays allocated, and its content is undefined."""
    if (libc := _libc()) is not None:
        begin = memory.__array_interface__["data"][0]
        end = (begin + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < end:
            libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)


class _ReturnedMemory(np.ndarray[Any, Any]):
    """Owns its memory: a view of an array refers to the owner, and not to views between them."""

    is_short: Callable[[], bool] | None = None  # of the object itself; its views have None

    def __del__(self) -> None:
        if self.is_short is not None and self.is_short():
            discard(self)


@cache
def _libc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
