"""The CUDA driver, without any package: memory of GPUs, its IPC handles, and copies."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import ClassVar

#: The size of a ``CUipcMemHandle``.
IPC_HANDLE_BYTES = 64
_PEER_ACCESS = 1
#: A stream that does not wait for the default stream.
_NON_BLOCKING = 1
_UUID_BYTES = 16
#: ``CUstreamCaptureMode``: this thread may make calls that a capture of another thread forbids by default.
_RELAXED = 2
_CAPTURE_ERRORS = range(900, 910)
#: Functions that never wait. They hold the interpreter's lock: reacquiring it beside a busy event loop takes longer.
_SHORT = (
    *("cuCtxSetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemcpyDtoDAsync_v2"),
    "cuThreadExchangeStreamCaptureMode",
)
#: Copies from the host of fewer bytes hold it, too: they take less than 0.1 ms.
_SHORT_BYTES = 1 << 20


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class CudaError(OSError):
    """The driver refused a call. ``code`` is its ``CUresult``; 0 if there is no driver."""

    code = 0

    @property
    def is_for_a_capture(self) -> bool:
        """True if the call fails only while a stream of the device is captured into a graph."""
        return self.code in _CAPTURE_ERRORS


class CudaLibrary:
    """The functions of the CUDA driver that Headrace needs. Any thread, but those that copy may block."""

    #: DLPack's number of its kind of device.
    kind: ClassVar[int] = 2

    def __init__(self) -> None:
        """Load the driver. Raises `CudaError` if there is none, or no GPU."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._keeping = ctypes.PyDLL("libcuda.so.1")
        except OSError:
            raise CudaError("there is no CUDA driver") from None
        try:
            self._declare()
        except AttributeError as error:
            raise CudaError(f"the CUDA driver is too old: {error}") from None
        self._call("cuInit", 0)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._streams: dict[int, int] = {}
        self._streams_lock = threading.Lock()

    def _declare(self) -> None:
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        library = self._library
        library.cuIpcOpenMemHandle_v2.argtypes = (pointer, _Handle, ctypes.c_uint)
        library.cuIpcCloseMemHandle.argtypes = (address,)
        library.cuIpcGetMemHandle.argtypes = (pointer, address)
        library.cuDeviceGetUuid.argtypes = (pointer, ctypes.c_int)
        library.cuMemAlloc_v2.argtypes = (pointer, size)
        library.cuMemFree_v2.argtypes = (address,)
        library.cuMemGetAddressRange_v2.argtypes = (pointer, pointer, address)
        library.cuMemcpyDtoH_v2.argtypes = (pointer, address, size)
        library.cuMemcpyHtoD_v2.argtypes = (address, pointer, size)
        for each in (library, self._keeping):
            each.cuMemcpyHtoDAsync_v2.argtypes = (address, pointer, size, pointer)
        self._keeping.cuMemcpyDtoDAsync_v2.argtypes = (address, address, size, pointer)
        library.cuStreamCreate.argtypes = (pointer, ctypes.c_uint)
        library.cuStreamDestroy_v2.argtypes = (pointer,)
        library.cuStreamSynchronize.argtypes = (pointer,)
        library.cuCtxSynchronize.argtypes = ()

    def devices(self) -> list[str]:
        """Return the UUID of each device, by its number. Uses no memory of a device. Raises `CudaError`."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        found = []
        for number in range(count.value):
            device, uuid = ctypes.c_int(), ctypes.create_string_buffer(_UUID_BYTES)
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
            self._call("cuDeviceGetUuid", uuid, device)
            found.append(uuid.raw.hex())
        return found

    def use(self, device: int) -> None:
        """Make the primary context of ``device`` that of this thread. Raises `CudaError`."""
        self._call("cuCtxSetCurrent", self._context(device))

    @contextmanager
    def using(self, device: int) -> Iterator[None]:
        """`use` it, and restore the device of this thread afterwards. Raises `CudaError`.

        Calls in this context do not end the capture of a graph by another thread.
        """
        mode = ctypes.c_int(_RELAXED)
        self._call("cuCtxPushCurrent_v2", self._context(device))
        try:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> ctypes.c_void_p:
        context = self._contexts.get(device)
        if context is None:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context
        return context

    def allocate(self, size: int) -> int:
        """Return the address of new memory on the device that this thread uses. Raises `CudaError`."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Free what `allocate` returned. No other process may have it open."""
        self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """Return the IPC handle of what `allocate` returned, for `open` in other processes. Raises `CudaError`."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Return the address of the memory of ``handle``, of another process. Raises `CudaError`."""
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Release what `open` returned."""
        self._call("cuIpcCloseMemHandle", address)

    def size(self, address: int) -> int:
        """Return the number of bytes from ``address`` to the end of its allocation. Raises `CudaError`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value + size.value - address

    def read(self, target: int, address: int, size: int) -> None:
        """Copy ``size`` bytes of the device from ``address`` to the host's ``target``. Blocks."""
        self._call("cuMemcpyDtoH_v2", target, address, size)

    def write(self, address: int, source: int, size: int) -> None:
        """Copy ``size`` bytes of the host from ``source`` to the device's ``address``. Blocks."""
        self._call("cuMemcpyHtoD_v2", address, source, size)

    def new_stream(self) -> int:
        """Return a new stream of the device that this thread uses, by its address. Raises `CudaError`."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return int(stream.value or 0)

    def end_stream(self, stream: int) -> None:
        """Release what `new_stream` returned, when its work is done. After `use`."""
        self._call("cuStreamDestroy_v2", stream)

    def stream(self, device: int) -> int:
        """Return the shared stream of ``device`` for `copy`, by its address. After `use`. Raises `CudaError`."""
        with self._streams_lock:
            if device not in self._streams:
                self._streams[device] = self.new_stream()
            return self._streams[device]

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes of the device behind the work of ``stream``, and wait. After `use`. Blocks."""
        self.queue_copy(target, source, size, stream)
        self.finish(stream)

    def queue_copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes of the device behind the work of ``stream``. After `use`."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, stream)

    def queue_write(self, address: int, source: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes of the host, which must stay, behind the work of ``stream``. After `use`. Blocks for as
        long as the CPU copies, unless they are in pinned memory."""
        library = self._keeping if size < _SHORT_BYTES else self._library
        self._check("cuMemcpyHtoDAsync_v2", library.cuMemcpyHtoDAsync_v2(address, source, size, stream))

    def finish(self, stream: int) -> None:
        """Wait until the work of ``stream`` is done. After `use`. Blocks."""
        self._call("cuStreamSynchronize", stream)

    def wait(self) -> None:
        """Wait until the device that this thread uses has done its work. Blocks."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._keeping if name in _SHORT else self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            error = CudaError(f"{name} failed with CUresult {code}")
            error.code = code
            raise error


@cache
def cuda_library() -> CudaLibrary:
    """Return the driver of this process, which the first call loads. Raises `CudaError` as `CudaLibrary` does."""
    return CudaLibrary()
