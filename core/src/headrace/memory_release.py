"""Memory release: return memory that large work has freed to the system. glibc alone keeps it on purpose."""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import Any

# From glibc's malloc.h. If one of the thresholds is set, glibc raises neither of them with the freed sizes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_TRIM_THRESHOLD_BYTES, _MMAP_THRESHOLD_BYTES = 64 << 20, 32 << 20
#: Freeing 128 KiB makes glibc trim the end of the heap.
_FREED_BYTES = 128 << 10
#: The number of heaps that `release_left_heaps` checks: glibc makes 8 for each core.
_HEAPS = 16


def release_memory() -> None:
    """Return the free memory of all heaps, and the free end of the calling thread's heap, which only that thread can.

    Takes a few ms. Does nothing without glibc.
    """
    if (libc := _glibc()) is None:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    libc.free(libc.malloc(_FREED_BYTES))
    libc.malloc_trim(0)
    libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def release_left_heaps() -> None:
    """Return the free ends of heaps that belong to no thread now, because their threads have ended.

    Only a thread that has such a heap can do that, and a new thread takes one over. So this starts `_HEAPS` threads,
    which exist at the same time. Blocks for some ms. Does nothing without glibc.
    """
    if (libc := _glibc()) is None:
        return
    has_heap = threading.Barrier(_HEAPS)

    def release() -> None:
        with suppress(threading.BrokenBarrierError):
            has_heap.wait()
            libc.free(libc.malloc(_FREED_BYTES))

    threads = [threading.Thread(target=release, name="headrace-release", daemon=True) for _ in range(_HEAPS)]
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:  # the system allows no more threads
        has_heap.abort()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def share_heap() -> None:
    """Let threads that start from now on allocate from existing heaps.

    For threads that Headrace does not control: they never call `release_memory`, and only the thread itself can return
    the free end of a heap of its own. For the whole process. Does nothing without glibc.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)


@cache  # a new one each time would be a reference cycle
def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
    return libc
