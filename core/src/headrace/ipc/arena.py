"""Memory that two processes share, one to write tensors into and the other to read them.

An arena has no name: its descriptor is inherited, so nothing can leak, be guessed or clash. Its
size is address space; pages are taken as they are used, and no more than that. It is sealed, so
that neither side can shrink it under the other.

The side that allocates has a `Writer`, the other a `Reader`. What the writer knows of free blocks, its
`FreeList`, is in its own memory: the peer can spoil the contents of the arena, and nothing else.
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

#: Pages up to here stay with an arena when nothing is in it; fresh ones cost as much as a copy.
KEPT_BYTES: Final = 64 * 1024 * 1024
#: Pages up to here stay with an arena that has not been used for `IDLE_S`, or twice as long.
IDLE_BYTES: Final = 1024 * 1024
IDLE_S: Final = 2.5
#: Pages are taken in steps of this.
STEP_BYTES: Final = 64 * 1024
#: Every block begins at a multiple of this and is that long: a cache line, and enough for any SIMD load.
ALIGNMENT: Final = 64

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


class Arena:
    """``size`` bytes of shared memory. ``fd`` is for the process that shall attach to it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self.memory: mmap.mmap | None = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int) -> Arena:
        """A new arena, all zeros. Raises `OSError` if there are no descriptors or no address space."""
        fd = _anonymous_file(size)
        try:
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int) -> Arena:
        """The arena that was inherited as ``fd``. Raises `ValueError` if it is smaller than ``size``."""
        found = os.fstat(fd).st_size
        if found < size:
            raise ValueError(f"an arena of {found} bytes, expected {size}")
        os.set_inheritable(fd, False)
        return cls(fd, size)

    def close(self) -> None:
        """Let go of it. Views that others hold stay valid, and the last of them frees the memory."""
        if self.memory is not None:
            self.memory = None
            os.close(self.fd)


class Writer:
    """Allocates in an arena. One thread at a time; nobody else may allocate in the same arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free_list = FreeList(arena.size)
        self._backed = 0
        #: How many places have been reserved, and how many had been at the last `shrink`.
        self._uses = self._uses_before = 0

    def place(self, data: memoryview) -> int | None:
        """Copy ``data`` (C-contiguous) into the arena; its offset, or None if there is no room."""
        nbytes = data.nbytes
        offset = self.reserve(nbytes)
        if offset is not None and nbytes:
            self.view(offset, nbytes)[:] = data.cast("B")
        return offset

    def reserve(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` that are the caller's until `release`, or None if there is no room.

        Memory that has not been used before is asked for here: without it there is no room either,
        where touching it would be a SIGBUS.
        """
        if self._arena.memory is None:
            return None
        offset = self._free_list.take(nbytes)
        if offset is None:
            return None
        self._uses += 1
        if offset + nbytes > self._backed and not self._back(offset + nbytes):
            self._free_list.give_back(offset)
            return None
        return offset

    def view(self, offset: int, nbytes: int) -> memoryview:
        """What was reserved, to write into."""
        memory = self._arena.memory
        assert memory is not None
        return memoryview(memory)[offset : offset + nbytes]

    def release(self, offset: int) -> None:
        """Free what begins at ``offset``. Raises `ValueError` if nothing does: the peer may say anything."""
        self._free_list.give_back(offset)
        if self._backed > KEPT_BYTES and self._free_list.is_empty:
            self._trim(KEPT_BYTES)

    @property
    def can_shrink(self) -> bool:
        """True if it keeps pages that `shrink` would give back in time."""
        return self._backed > IDLE_BYTES and self._arena.memory is not None and sys.platform == "linux"

    def shrink(self) -> None:
        """Give back pages above `IDLE_BYTES` if nothing is in use, and nothing has been since the last call."""
        if self._uses == self._uses_before and self._free_list.is_empty:
            self._trim(IDLE_BYTES)
        self._uses_before = self._uses

    def _back(self, end: int) -> bool:
        """Have memory for everything before ``end``; False if there is none."""
        target = min(-(-end // STEP_BYTES) * STEP_BYTES, self._arena.size)
        try:
            _allocate(self._arena.fd, self._backed, target - self._backed)
        except OSError:
            return False
        self._backed = target
        return True

    def _trim(self, kept_bytes: int) -> None:
        """Give the pages above ``kept_bytes`` back to the system."""
        memory = self._arena.memory
        if memory is not None and sys.platform == "linux":
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_REMOVE, kept_bytes, self._backed - kept_bytes)
                self._backed = kept_bytes


class FreeList:
    """Which parts of ``size`` bytes are taken: first fit, lowest address first, neighbours joined. Not thread-safe.

    Taking the lowest address keeps the pages in use together at the beginning, where they are
    warm. Costs grow with the number of holes, about 30 ns each.
    """

    def __init__(self, size: int) -> None:
        self._taken: dict[int, int] = {}
        self._begins, self._sizes = [0], [size - size % ALIGNMENT]  # the holes, in order of address

    def take(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` that nobody else has; None if no hole is large enough.

        Raises `ValueError` for a negative number. No bytes take a place, too.
        """
        if nbytes < 0:
            raise ValueError(f"a block of {nbytes} bytes")
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        for index, size in enumerate(self._sizes):
            if size >= wanted:
                return self._cut(index, wanted)
        return None

    def give_back(self, offset: int) -> None:
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

    def _cut(self, index: int, wanted: int) -> int:
        offset = self._begins[index]
        if self._sizes[index] == wanted:
            del self._begins[index], self._sizes[index]
        else:
            self._begins[index] += wanted
            self._sizes[index] -= wanted
        self._taken[offset] = wanted
        return offset

    def _join(self, index: int) -> None:
        """Make one hole of the one at ``index`` and the next, if they touch."""
        begins, sizes = self._begins, self._sizes
        if index + 1 < len(begins) and begins[index] + sizes[index] == begins[index + 1]:
            sizes[index] += sizes.pop(index + 1)
            del begins[index + 1]


class Reader:
    """Looks at what the peer has placed in its arena. Any thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._watches: dict[int, _Watch] = {}

    def view(self, offset: int, nbytes: int, on_free: Callable[[int], None]) -> Bytes:
        """``nbytes`` at ``offset``, without a copy. Raises `ValueError` if they are not in the arena.

        The memory stays mapped as long as the view or anything made from it lives: slices,
        reshapes, memoryviews, tensors of other libraries. When the last of them goes,
        ``on_free(offset)`` is called, once, on the thread that let go of it, and possibly in the
        middle of whatever that thread does: it must take no lock and not raise. It is not called
        after the reader itself has gone, nor while the interpreter exits.
        """
        arena = self._arena
        if arena.memory is None or offset < 0 or nbytes < 0 or offset + nbytes > arena.size:
            raise ValueError(f"{nbytes} bytes at {offset} are not in an arena of {arena.size}")
        # Every view that NumPy makes of this array refers to it: NumPy follows a chain of bases
        # only while they are arrays, and the base of this one is the mapping.
        view = np.frombuffer(arena.memory, np.uint8, nbytes, offset)
        watch = _Watch(view, self._gone)
        watch.offset, watch.on_free = offset, on_free
        self._watches[id(watch)] = watch
        return view

    def _gone(self, watch: weakref.ref[Any]) -> None:
        assert isinstance(watch, _Watch)
        del self._watches[id(watch)]
        if not sys.is_finalizing():
            watch.on_free(watch.offset)


class _Watch(weakref.ref[Any]):
    """Waits for the end of a view. Cheaper than `weakref.finalize`."""

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
        """A file without a name: the closest that other systems have."""
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            return os.dup(file.fileno())

    def _allocate(fd: int, offset: int, nbytes: int) -> None:
        """Zeros, which fail with `OSError` where touching a page would kill."""
        os.pwrite(fd, bytes(nbytes), offset)
