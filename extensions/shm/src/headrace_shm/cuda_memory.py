"""CUDA regions: memory of a GPU that another process has allocated, opened by its IPC handle."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import numpy as np

from headrace import InvalidArgument

#: The size of a ``cudaIpcMemHandle_t``.
HANDLE_BYTES = 64
_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaError(OSError):
    """The driver has refused a call."""


class CudaLibrary:
    """The functions of the CUDA driver that this needs. Any thread."""

    def __init__(self) -> None:
        """Load the driver. Raises `CudaError` if there is none, or no GPU."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise CudaError("there is no CUDA driver") from None
        try:
            self._declare()
        except AttributeError as error:
            raise CudaError(f"the CUDA driver is too old: {error}") from None
        self._call("cuInit", 0)
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def _declare(self) -> None:
        address, size = ctypes.c_uint64, ctypes.c_size_t
        self._library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
        self._library.cuIpcCloseMemHandle.argtypes = (address,)
        self._library.cuMemGetAddressRange_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, address)
        self._library.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, address, size)
        self._library.cuMemcpyHtoD_v2.argtypes = (address, ctypes.c_void_p, size)

    def use(self, device: int) -> None:
        """Make the primary context of ``device`` that of this thread. Raises `CudaError`."""
        context = self._contexts.get(device)
        if context is None:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def open(self, handle: bytes) -> int:
        """Return the address of the memory of ``handle``. Raises `CudaError`."""
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def size(self, address: int) -> int:
        """Return the number of bytes from ``address`` to the end of its allocation. Raises `CudaError`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value + size.value - address

    def read(self, target: int, address: int, size: int) -> None:
        """Copy ``size`` bytes of the device from ``address`` to the host's ``target``."""
        self._call("cuMemcpyDtoH_v2", target, address, size)

    def write(self, address: int, source: int, size: int) -> None:
        """Copy ``size`` bytes of the host from ``source`` to the device's ``address``."""
        self._call("cuMemcpyHtoD_v2", address, source, size)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(f"{name} failed with CUresult {code}")


class CudaMemory:
    """The memory of a CUDA region. Models get copies in the memory of the host."""

    is_copied: ClassVar[bool] = True

    def __init__(self, driver: CudaLibrary, handle: bytes, device: int, size: int) -> None:
        """Open ``handle``. Raises `CudaError`, also if its allocation has less than ``size`` bytes. Blocks."""
        self._driver, self._device = driver, device
        driver.use(device)
        address = driver.open(handle)
        if driver.size(address) < size:
            driver.close(address)
            raise CudaError("the allocation is smaller than the region")
        self._address = address  # from here on `__del__` closes it

    def check(self) -> None:
        """Return: another process can not take the memory away while it is open."""

    def copy(self, offset: int, size: int) -> memoryview:
        copied = np.empty(size, np.uint8)
        self._driver.use(self._device)
        self._driver.read(copied.ctypes.data, self._address + offset, size)
        return copied.data

    read = copy

    def target(self, offset: int, size: int) -> memoryview:
        return np.asarray(_Staged(self, offset, size)).data

    def write(self, offset: int, content: int, size: int) -> None:
        self._driver.use(self._device)
        self._driver.write(self._address + offset, content, size)

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._driver.use(self._device)
            self._driver.close(self._address)


class _Staged:
    """Memory of the host for an output of ``size`` bytes, which is then copied to the device."""

    def __init__(self, memory: CudaMemory, offset: int, size: int) -> None:
        self._memory, self._offset = memory, offset
        self._host = np.empty(size, np.uint8)

    @property
    def __array_interface__(self) -> object:
        return self._host.__array_interface__

    def finish(self, memory: memoryview, written: int) -> None:
        self._memory.write(self._offset, self._host.ctypes.data, written)


_driver: CudaLibrary | None = None


def open_region(name: str, handle: bytes, device: int, size: int) -> CudaMemory:
    """Return the memory of the region ``name``. Raises `InvalidArgument`. Blocks."""
    global _driver
    if _driver is None:
        try:
            _driver = CudaLibrary()
        except CudaError:
            raise InvalidArgument(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
            ) from None
    if len(handle) != HANDLE_BYTES or not size or not 0 <= device < 1 << 31:
        raise InvalidArgument(f"failed to register CUDA shared memory region '{name}': invalid args")
    try:
        return CudaMemory(_driver, handle, device, size)
    except (CudaError, OverflowError, ctypes.ArgumentError) as error:
        raise InvalidArgument(f"failed to register CUDA shared memory region '{name}': {error}") from None
