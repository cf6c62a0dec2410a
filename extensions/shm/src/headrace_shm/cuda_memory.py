"""CUDA regions: memory of a GPU that another process has allocated, opened by its IPC handle."""

from __future__ import annotations

import _thread
import ctypes
from contextlib import suppress
from math import prod
from typing import Any, ClassVar

import numpy as np

from headrace import DeviceTensor, InvalidArgument, Spec, dtypes
from headrace_engines import (
    IPC_HANDLE_BYTES,
    MOST_AXES,
    AddressedTensor,
    CudaError,
    CudaLibrary,
    address_of,
    cuda_library,
)

#: The alignment that kernels need for their widest reads.
_ALIGNMENT = 16


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
        if datatype is dtypes.BYTES or not size or self.address(offset) % _ALIGNMENT or len(shape) > MOST_AXES:
            return None
        if min(shape, default=0) < 0 or prod(shape) * datatype.itemsize != size:
            return None
        self._is_lent = True
        return AddressedTensor(self, offset, shape, datatype.numpy)

    def address(self, offset: int) -> int:
        return self._address + offset

    def take(self, offset: int, tensor: DeviceTensor) -> bool:
        """Copy ``tensor`` to ``offset`` within the device, and wait. False if it is elsewhere or not contiguous."""
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
            _driver = cuda_library()
        except CudaError:
            raise InvalidArgument(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
            ) from None
    if len(handle) != IPC_HANDLE_BYTES or not size or not 0 <= device < 1 << 31:
        raise InvalidArgument(f"failed to register CUDA shared memory region '{name}': invalid args")
    try:
        return CudaMemory(_driver, handle, device, size)
    except (CudaError, OverflowError, ctypes.ArgumentError) as error:
        raise InvalidArgument(f"failed to register CUDA shared memory region '{name}': {error}") from None
