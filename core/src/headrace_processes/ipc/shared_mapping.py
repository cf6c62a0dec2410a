"""Shared memory that another program owns and may shrink: `SharedMapping`.

A model process maps it, too (`headrace_processes.ipc.mappings`), so that its tensors are not copied between processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from errno import ENOTSUP
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headrace_processes.ipc.bus_errors import BusErrors, Pages, handler

#: The address of a mapping that failed.
_FAILED: Final = ctypes.c_void_p(-1).value
#: The kernel needs about 1 ms to remove the pages of this many bytes.
_LARGE_BYTES: Final = 1 << 30

_library = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _library.mmap, _library.munmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class FileTooSmall(OSError):
    """The file ends before the mapping does."""


class SharedMapping:
    """``size`` bytes of a file from ``offset`` on, mapped for reading and writing.

    They stay mapped as long as this object or a view of `memory` exists. The thread that frees the last of them removes
    the mapping. No descriptor is kept. If the file shrinks, or the system has no free page, the pages are replaced by
    zeros and `is_lost` is set: the process keeps running. Any thread.
    """

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        """Map the file. Raises OSError, and `FileTooSmall`; the caller closes ``descriptor``."""
        guard = handler()
        before = offset % mmap.PAGESIZE
        if offset + size > os.fstat(descriptor).st_size:
            raise FileTooSmall(f"the file has less than {offset + size} bytes")
        whole = -(-(before + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        address = _mmap(None, whole, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset - before)
        if address == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.address, self.offset, self.size = address + before, offset, size
        self._pages = Pages(address, whole)
        guard.add(self._pages)
        weakref.finalize(self, _unmap, guard, self._pages).atexit = False

    def reopen(self) -> int:
        """Return a new descriptor of the file, for a process that maps it, too. The caller closes it.

        Raises OSError if that is impossible. Tensors in it are then copied to model processes. Event loop only.
        """
        raise OSError(ENOTSUP, os.strerror(ENOTSUP))

    @property
    def is_lost(self) -> bool:
        """True if the pages are no longer those of the file, here or in a process that maps it, too."""
        return self._pages.is_lost

    def lose(self) -> None:
        """Set `is_lost`: another process has lost the pages."""
        self._pages.is_lost = True

    @property
    def memory(self) -> memoryview:
        """All bytes. A slice of it keeps the mapping."""
        return np.asarray(self).data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}


def mapping_of(tensor: npt.NDArray[Any] | memoryview) -> tuple[SharedMapping, int] | None:
    """Return the mapping that contains all bytes of ``tensor``, and their offset in it.

    Return None if there is none, or if the bytes are not contiguous.
    """
    owner: Any = tensor
    while True:
        if isinstance(owner, memoryview):
            owner = owner.obj
        elif isinstance(owner, np.ndarray):
            owner = owner.base
        else:
            break
    if not isinstance(owner, SharedMapping):
        return None
    array = np.asarray(tensor)
    offset = array.__array_interface__["data"][0] - owner.address
    if not array.flags.c_contiguous or offset < 0 or offset + array.nbytes > owner.size:
        return None
    return owner, offset


def _unmap(guard: BusErrors, pages: Pages) -> None:
    guard.remove(pages)
    if pages.size >= _LARGE_BYTES:
        try:
            threading.Thread(target=_munmap, args=pages.bounds, name="headrace-unmap", daemon=True).start()
            return
        except RuntimeError:  # the interpreter ends
            pass
    _munmap(*pages.bounds)
