"""Shared memory between two processes: one writes tensors into it, the other reads them.

An arena has no name: the other process inherits its descriptor, so no name can leak, be guessed or collide. Its size
is address space only; pages are allocated as they are used. On Linux it is sealed: neither process can shrink it while
the other uses it.

The side that allocates has a `Writer`, the other side a `Reader`. The writer's list of free blocks, its `FreeList`, is
in its private memory: a broken peer can damage the contents of the arena, and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

#: An empty arena keeps this many bytes of pages: to allocate a page again costs as much as to copy into it.
KEPT_BYTES: Final = 64 * 1024 * 1024
#: An arena that has been unused for `IDLE_S` to twice `IDLE_S` seconds keeps this many bytes of pages.
IDLE_BYTES: Final = 1024 * 1024
IDLE_S: Final = 2.5
#: Pages are allocated in multiples of this.
STEP_BYTES: Final = 64 * 1024
#: Offset and size of every block are multiples of this: a cache line, and enough for any SIMD load.
ALIGNMENT: Final = 64

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


class Arena:
    """``size`` bytes of shared memory. The other process inherits ``fd`` and attaches to it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self.memory: mmap.mmap | None = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int) -> Arena:
        """Return a new arena, all zeros. Raises `OSError` if no descriptor or no address space is left."""
        fd = _anonymous_file(size)
        try:
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int) -> Arena:
        """Return the arena inherited as ``fd``. Raises `ValueError` if it is smaller than ``size``."""
        actual = os.fstat(fd).st_size
        if actual < size:
            raise ValueError(f"an arena of {actual} bytes, expected {size}")
        os.set_inheritable(fd, False)
        return cls(fd, size)

    def close(self) -> None:
        """Release the arena. Existing views stay valid; the memory is freed with the last of them."""
        if self.memory is not None:
            self.memory = None
            os.close(self.fd)


class Writer:
    """Allocates blocks in an arena. One thread at a time; an arena has one writer only."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free_list = FreeList(arena.size)
        self._backed = 0
        #: The number of successful reservations so far, and that number at the last `shrink`.
        self._uses = self._uses_before = 0

    def place(self, data: memoryview) -> int | None:
        """Copy ``data`` (C-contiguous) into the arena. Return its offset, or None if there is no room."""
        nbytes = data.nbytes
        offset = self.reserve(nbytes)
        if offset is not None and nbytes:
            self.view(offset, nbytes)[:] = data.cast("B")
        return offset

    def reserve(self, nbytes: int) -> int | None:
        """Return the offset of a block of ``nbytes``, or None if there is no room. The caller owns it until `release`.

        Pages are allocated here. If the system has none left, return None: a write to the block without pages would be
        a SIGBUS.
        """
        if self._arena.memory is None:
            return None
        offset = self._free_list.allocate(nbytes)
        if offset is None:
            return None
        self._uses += 1
        if offset + nbytes > self._backed and not self._back(offset + nbytes):
            self._free_list.free(offset)
            return None
        return offset

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a writable view of ``nbytes`` at ``offset``, which the caller has reserved."""
        memory = self._arena.memory
        assert memory is not None
        return memoryview(memory)[offset : offset + nbytes]

    def release(self, offset: int) -> None:
        """Free the block at ``offset``. Raises `ValueError` if no block begins there: the peer may send any offset."""
        self._free_list.free(offset)
        if self._backed > KEPT_BYTES and self._free_list.is_empty:
            self._trim(KEPT_BYTES)

    @property
    def can_shrink(self) -> bool:
        """True if a later call of `shrink` may return pages to the system."""
        return self._backed > IDLE_BYTES and self._arena.memory is not None and sys.platform == "linux"

    def shrink(self) -> None:
        """Return pages above `IDLE_BYTES` to the system, if no block is in use, and none was reserved since the last
        call."""
        if self._uses == self._uses_before and self._free_list.is_empty:
            self._trim(IDLE_BYTES)
        self._uses_before = self._uses

    def _back(self, end: int) -> bool:
        """Allocate the pages up to ``end``. Return False if the system has no memory left."""
        target = min(-(-end // STEP_BYTES) * STEP_BYTES, self._arena.size)
        try:
            _allocate(self._arena.fd, self._backed, target - self._backed)
        except OSError:
            return False
        self._backed = target
        return True

    def _trim(self, kept_bytes: int) -> None:
        """Return the pages above ``kept_bytes`` to the system."""
        memory = self._arena.memory
        if memory is not None and sys.platform == "linux":
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_REMOVE, kept_bytes, self._backed - kept_bytes)
                self._backed = kept_bytes


class FreeList:
    """Allocates blocks in ``size`` bytes by first fit, and merges adjacent free blocks. Not thread-safe.

    The lowest free address is used first, so the pages in use stay together at the beginning, where they are cached.
    The cost grows with the number of free blocks, about 30 ns each.
    """

    def __init__(self, size: int) -> None:
        self._taken: dict[int, int] = {}
        self._begins, self._sizes = [0], [size - size % ALIGNMENT]  # the free blocks, by address

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a new block of ``nbytes``, or None if no free block is large enough.

        0 bytes occupy a block. Raises `ValueError` for a negative number.
        """
        if nbytes < 0:
            raise ValueError(f"a block of {nbytes} bytes")
        block_bytes = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        for index, size in enumerate(self._sizes):
            if size >= block_bytes:
                return self._cut(index, block_bytes)
        return None

    def free(self, offset: int) -> None:
        """Free the block at ``offset``. Raises `ValueError` if there is none."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise ValueError(f"no block begins at {offset}")
        begins, sizes = self._begins, self._sizes
        index = bisect_left(begins, offset)
        begins.insert(index, offset)
        sizes.insert(index, size)
        self._join(index)
        if index:
            self._join(index - 1)

    @property
    def is_empty(self) -> bool:
        return not self._taken

    def _cut(self, index: int, block_bytes: int) -> int:
        offset = self._begins[index]
        if self._sizes[index] == block_bytes:
            del self._begins[index], self._sizes[index]
        else:
            self._begins[index] += block_bytes
            self._sizes[index] -= block_bytes
        self._taken[offset] = block_bytes
        return offset

    def _join(self, index: int) -> None:
        """Merge the free block at ``index`` with the next one if they are adjacent."""
        begins, sizes = self._begins, self._sizes
        if index + 1 < len(begins) and begins[index] + sizes[index] == begins[index + 1]:
            sizes[index] += sizes.pop(index + 1)
            del begins[index + 1]


class Reader:
    """Returns views of the tensors in the peer's arena. Any thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._watches: dict[int, _Watch] = {}

    def view(self, offset: int, nbytes: int, on_free: Callable[[int], None]) -> Bytes:
        """Return ``nbytes`` at ``offset`` without a copy. Raises `ValueError` if they are not in the arena.

        The memory stays mapped as long as the view or anything made from it exists: slices, reshapes, memoryviews,
        tensors of other libraries. When the last of them is freed, ``on_free(offset)`` is called once, on the thread
        that freed it. It may interrupt any code of that thread: it must allocate no lock and must not raise. It is not
        called once the reader itself is freed, nor while the interpreter exits.
        """
        arena = self._arena
        if arena.memory is None or offset < 0 or nbytes < 0 or offset + nbytes > arena.size:
            raise ValueError(f"{nbytes} bytes at {offset} are not in an arena of {arena.size}")
        # Every NumPy view of this array keeps a reference to it. NumPy shortens a chain of bases only while the base is
        # an array, and the base of this array is the mapping.
        view = np.frombuffer(arena.memory, np.uint8, nbytes, offset)
        watch = _Watch(view, self._on_freed)
        watch.offset, watch.on_free = offset, on_free
        self._watches[id(watch)] = watch
        return view

    def _on_freed(self, watch: weakref.ref[Any]) -> None:
        assert isinstance(watch, _Watch)
        del self._watches[id(watch)]
        if not sys.is_finalizing():
            watch.on_free(watch.offset)


class _Watch(weakref.ref[Any]):
    """Calls a function when a view is freed. Cheaper than `weakref.finalize`."""

    __slots__ = ("offset", "on_free")
    offset: int
    on_free: Callable[[int], None]


if sys.platform == "linux":

    def _anonymous_file(size: int) -> int:
        fd = os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd

    _allocate = os.posix_fallocate

else:

    def _anonymous_file(size: int) -> int:
        """Return a file without a name: the nearest equivalent on other systems. It cannot be sealed."""
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            return os.dup(file.fileno())

    def _allocate(fd: int, offset: int, nbytes: int) -> None:
        """Write zeros. Raises `OSError` if the disk is full, where access to the mapping would be a SIGBUS."""
        os.pwrite(fd, bytes(nbytes), offset)
