"""POSIX shared memory, mapped: the part of a client's segment that is one region."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import threading
import weakref
from errno import ENOENT
from pathlib import Path
from typing import Any

import numpy as np

from headrace_shm.bus_errors import BusErrors, Pages, handler

_DIRECTORY = Path("/dev/shm")
#: The address of a mapping that failed.
_FAILED = ctypes.c_void_p(-1).value
#: The kernel needs about 1 ms to remove the pages of so many bytes.
_LARGE_BYTES = 1 << 30

_library = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _library.mmap, _library.munmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class SegmentTooSmall(OSError):
    """The segment ends before the region does."""


def open_segment(key: str) -> int:
    """Return a descriptor of the segment ``key``, without slashes before it, as ``shm_open`` does.

    Raises OSError if there is none, if it is not a regular file, or if this process may not read and write it.
    """
    if "/" in key or "\0" in key or key in (".", ".."):
        raise OSError(ENOENT, f"{key!a} is no name of a segment")
    # Not a link, not a terminal that would become this process's, not a pipe that waits for its other end.
    descriptor = os.open(_DIRECTORY / key, os.O_RDWR | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(ENOENT, f"{key!a} is no regular file")
    return descriptor


class Mapping:
    """``size`` bytes of a segment from ``offset`` on, for reading and writing.

    They stay mapped as long as this object or a view of `memory` exists: the last one to go removes the mapping,
    whichever thread it is on. No descriptor is kept.
    """

    def __init__(self, key: str, offset: int, size: int) -> None:
        """Map the segment. Raises OSError, and `SegmentTooSmall`."""
        guard = handler()
        before = offset % mmap.PAGESIZE
        descriptor = open_segment(key)
        try:
            if offset + size > os.fstat(descriptor).st_size:
                raise SegmentTooSmall(f"segment {key!a} has less than {offset + size} bytes")
            whole = -(-(before + size) // mmap.PAGESIZE) * mmap.PAGESIZE
            found = _mmap(None, whole, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset - before)
            if found == _FAILED:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
        finally:
            os.close(descriptor)
        self._first, self._bytes = found + before, size
        self._pages = Pages(found, whole)
        guard.add(self._pages)
        weakref.finalize(self, _unmap, guard, self._pages).atexit = False

    @property
    def is_lost(self) -> bool:
        """True if its pages are no longer those of the segment: it was shrunk, or /dev/shm was full."""
        return self._pages.is_lost

    @property
    def memory(self) -> memoryview:
        """All bytes. A slice of it keeps the mapping."""
        return np.asarray(self).data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._bytes,), "data": (self._first, False)}


def _unmap(guard: BusErrors, pages: Pages) -> None:
    guard.remove(pages)
    if pages.size >= _LARGE_BYTES:
        try:
            threading.Thread(target=_munmap, args=pages.bounds, name="shm-unmap", daemon=True).start()
            return
        except RuntimeError:  # the interpreter ends
            pass
    _munmap(*pages.bounds)
