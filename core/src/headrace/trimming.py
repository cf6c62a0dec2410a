"""Memory that large work took and freed goes back to the system. glibc alone keeps such memory on purpose."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

# From glibc's malloc.h. Whoever sets one keeps both from growing with what is freed, up to these sizes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_TRIM_THRESHOLD_BYTES, _MMAP_THRESHOLD_BYTES = 64 << 20, 32 << 20
#: Freeing so much lets glibc look at the end of the heap.
_LOOK_BYTES = 128 << 10


def trim() -> None:
    """Return what is free in all heaps, and the free end of the calling thread's own, which only it can return.

    Does nothing but where the C library is glibc. A few milliseconds.
    """
    if (libc := _glibc()) is None:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    libc.free(libc.malloc(_LOOK_BYTES))
    libc.malloc_trim(0)
    libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def share_heap() -> None:
    """Let threads that begin from here on take their memory from heaps that are there already.

    For threads that are not ours: what is free at the end of a heap of its own only such a thread could return, and
    it never calls `trim`. For the whole process; nothing where the C library is not glibc.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)


@cache  # each would be a cycle
def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
    return libc
