"""CUDA regions: memory of a GPU that another process has allocated, opened by its IPC handle."""

from __future__ import annotations

import _thread
import ctypes
import threading
from contextlib import suppress
from math import prod
from typing import Any, ClassVar

import numpy as np

from headrace import DeviceTensor, InvalidArgument, Spec, dtypes
from headrace_shm.region_tensors import RegionTensor, address_of

#: The size of a ``cudaIpcMemHandle_t``.
HANDLE_BYTES = 64
_PEER_ACCESS = 1
#: A stream that does not wait for the default stream.
_NON_BLOCKING = 1
#: Kernels read at most so many bytes at once, from addresses that are multiples of it.
_ALIGNMENT = 16
#: NumPy's capsules have at most 32 axes in its versions before 2.
_MOST_AXES = 32


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaError(OSError):
    """The driver has refused a call."""


class CudaLibrary:
    """The functions of the CUDA driver that this needs. Any thread."""

    #: Of its devices, in DLPack's numbers.
    kind: ClassVar[int] = 2

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
        self._streams: dict[int, int] = {}
        self._streams_lock = threading.Lock()

    def _declare(self) -> None:
        address, size = ctypes.c_uint64, ctypes.c_size_t
        self._library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
        self._library.cuIpcCloseMemHandle.argtypes = (address,)
        self._library.cuMemGetAddressRange_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, address)
        self._library.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, address, size)
        self._library.cuMemcpyHtoD_v2.argtypes = (address, ctypes.c_void_p, size)
        self._library.cuMemcpyDtoDAsync_v2.argtypes = (address, address, size, ctypes.c_void_p)
        self._library.cuStreamCreate.argtypes = (ctypes.c_void_p, ctypes.c_uint)
        self._library.cuStreamSynchronize.argtypes = (ctypes.c_void_p,)
        self._library.cuCtxSynchronize.argtypes = ()

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

    def stream(self, device: int) -> int:
        """Return the stream of ``device`` for `copy`, by its address. After `use`. Raises `CudaError`."""
        with self._streams_lock:
            if device not in self._streams:
                stream = ctypes.c_void_p()
                self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
                self._streams[device] = int(stream.value or 0)
            return self._streams[device]

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes of the device behind the work of ``stream``, and wait. After `use`. Blocks."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, stream)
        self._call("cuStreamSynchronize", stream)

    def wait(self) -> None:
        """Wait until the device that this thread uses has done its work. Blocks."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(f"{name} failed with CUresult {code}")


class CudaMemory:
    """The memory of a CUDA region. Models get copies in the memory of the host, or tensors on the GPU: `tensor`."""

    is_copied: ClassVar[bool] = True

    def __init__(self, driver: CudaLibrary, handle: bytes, device: int, size: int) -> None:
        """Open ``handle``. Raises `CudaError`, also if its allocation has less than ``size`` bytes. Blocks."""
        self._driver, self._device = driver, device
        self.device = driver.kind, device
        #: True if kernels may read it after a request is answered.
        self._is_lent = False
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

    def tensor(self, offset: int, size: int, spec: Spec) -> DeviceTensor | None:
        datatype, shape = spec.datatype, spec.dims
        if datatype is dtypes.BYTES or not size or self.address(offset) % _ALIGNMENT or len(shape) > _MOST_AXES:
            return None
        if min(shape, default=0) < 0 or prod(shape) * datatype.itemsize != size:
            return None
        self._is_lent = True
        return RegionTensor(self, offset, shape, datatype.numpy)

    def address(self, offset: int) -> int:
        return self._address + offset

    def take(self, offset: int, tensor: DeviceTensor) -> bool:
        """Copy ``tensor`` to ``offset``, within the device, and wait. False if it lies elsewhere, or has gaps."""
        if tensor.__dlpack_device__() != self.device or not tensor.nbytes:
            return False
        self._driver.use(self._device)
        stream = self._driver.stream(self._device)
        capsule: Any = tensor.__dlpack__(stream=stream)  # is kept until the copy is done
        source = address_of(capsule)
        if source is None:
            return False
        self._driver.use(self._device)  # again: an engine may have changed it
        self._driver.copy(self.address(offset), source, tensor.nbytes, stream)
        return True

    def target(self, offset: int, size: int) -> memoryview:
        return np.asarray(StagedOutput(self, offset, size)).data

    def write(self, offset: int, content: int, size: int) -> None:
        self._driver.use(self._device)
        self._driver.write(self._address + offset, content, size)

    def __del__(self) -> None:
        if not hasattr(self, "_address"):
            return
        if not self._is_lent:
            self._driver.use(self._device)
            self._driver.close(self._address)
            return
        # A kernel that finds no memory would end all work of this process on the GPU. The event loop may not wait.
        with suppress(RuntimeError):  # the interpreter ends, and the driver with it
            _thread.start_new_thread(_close_when_idle, (self._driver, self._device, self._address))


def _close_when_idle(driver: CudaLibrary, device: int, address: int) -> None:
    driver.use(device)
    try:
        driver.wait()
    finally:
        driver.close(address)


class StagedOutput:
    """Memory of the host for an output of ``size`` bytes, which is then copied to the device."""

    def __init__(self, memory: CudaMemory, offset: int, size: int) -> None:
        self._memory, self._offset = memory, offset
        self._host = np.empty(size, np.uint8)

    @property
    def __array_interface__(self) -> object:
        return self._host.__array_interface__

    def take(self, tensor: DeviceTensor) -> bool:
        """Copy an output within the device, without this memory of the host. See `CudaMemory.take`."""
        return self._memory.take(self._offset, tensor)

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
