"""Keeps the server alive when the pages of a mapping are lost: a handler for SIGBUS.

A client may shrink its segment at any time, and a full /dev/shm has no free page for a write. Then the next access to
the mapping raises SIGBUS, which ends a process without a handler. This handler replaces the pages of the mapping by
zeros, marks the mapping as lost, and returns. The access is repeated, and succeeds.

The signal is delivered to the thread that made the access, during a copy or a kernel of an engine. Neither holds the
lock of the interpreter, so the handler may run Python code: ctypes calls it as from any foreign thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys

_SA_SIGINFO = 4
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
#: Offsets in ``siginfo_t`` on 64-bit Linux.
_CODE, _ADDRESS = 8, 16

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """``struct sigaction`` of glibc and musl on Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class Pages:
    """The pages of one mapping: ``size`` bytes at ``address``."""

    __slots__ = ("address", "is_lost", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        #: True if they were replaced by zeros.
        self.is_lost = False

    @property
    def bounds(self) -> tuple[int, int]:
        return self.address, self.size


class BusErrors:
    """The handler of this process, for the mappings that are added to it. Any thread."""

    def __init__(self) -> None:
        # PyDLL: no other Python code runs between the fault and the new pages.
        library = ctypes.PyDLL(None, use_errno=True)
        self._sigaction, self._mmap = library.sigaction, library.mmap
        self._sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        self._mmap.restype = ctypes.c_void_p
        self._call = _HANDLER(self._handle)
        self._own = _Action(ctypes.cast(self._call, ctypes.c_void_p), flags=_SA_SIGINFO)
        self._before = _Action()
        self._guarded: dict[int, Pages] = {}

    def add(self, pages: Pages) -> None:
        """Guard ``pages`` until `remove`."""
        self._guarded[pages.address] = pages

    def remove(self, pages: Pages) -> None:
        """Stop guarding ``pages``, which are unmapped next."""
        self._guarded.pop(pages.address, None)

    def install(self) -> None:
        """Make this the handler of SIGBUS if it is not. Raises OSError."""
        now = _Action()
        self._sigaction(signal.SIGBUS, None, ctypes.byref(now))
        if now.handler == self._own.handler:
            return
        if self._sigaction(signal.SIGBUS, ctypes.byref(self._own), None):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._before = now

    def _handle(self, number: int, info: int, context: int) -> None:
        try:
            if ctypes.c_int.from_address(info + _CODE).value > 0:  # not sent by a process
                fault = ctypes.c_uint64.from_address(info + _ADDRESS).value
                for pages in tuple(self._guarded.values()):
                    if pages.address <= fault < pages.address + pages.size and self._replace(pages, fault):
                        return
        except BaseException:
            os.write(2, b"the handler of SIGBUS failed\n")
        # Not in a guarded mapping: restore the previous handler. It is called when the access is repeated.
        self._sigaction(signal.SIGBUS, ctypes.byref(self._before), None)
        if ctypes.c_int.from_address(info + _CODE).value <= 0:
            signal.raise_signal(signal.SIGBUS)

    def _replace(self, pages: Pages, fault: int) -> bool:
        """Replace ``pages`` by private pages of zeros; if they are too many, only the one that is accessed.

        Return False if there is no memory for it.
        """
        pages.is_lost = True
        page = fault - fault % mmap.PAGESIZE
        return any(self._put_zeros(*bounds) for bounds in (pages.bounds, (page, mmap.PAGESIZE)))

    def _put_zeros(self, address: int, size: int) -> bool:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        return bool(self._mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address)


def _supported() -> bool:
    return sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8


#: The handler of this process, created when the first region is registered.
_handler: BusErrors | None = None


def handler() -> BusErrors:
    """Return the handler of this process, installed. Raises OSError if this system has none."""
    global _handler
    if not _supported():
        raise OSError("client shared memory needs 64-bit Linux")
    if _handler is None:
        _handler = BusErrors()
    _handler.install()
    return _handler
