"""The memory of an instance's inputs and outputs: on the device, or on the host for shape tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace_tensorrt.cuda import CudaDevice, CudaStream
from headrace_tensorrt.plan_shapes import PlanTensor, Shape

#: TensorRT's alignment of every address, in bytes. Memory of the device always has it.
_ALIGNMENT = 256
#: A copy of so many bytes takes as long as releasing and reacquiring the interpreter's lock.
_SMALL_BYTES = 1 << 18


class TensorBuffer:
    """The memory of one input or output, for its largest shape. ``address`` may change in `reserve`.

    It is on the device. For a tensor that TensorRT requires in the host's memory, it is the array ``values``. An input
    may be staged (`stage`) in pinned memory of the same size, for the copy to the device.
    """

    def __init__(self, device: CudaDevice, tensor: PlanTensor, size_bytes: int, is_pinned: bool) -> None:
        self.tensor, self._device, self._size_bytes = tensor, device, 0
        self.values: npt.NDArray[np.uint8] | None = None
        self._staging: npt.NDArray[np.uint8] | None = None
        self._staging_address = 0
        self.address = 0
        self.reserve(size_bytes)
        if is_pinned and tensor.is_input and not tensor.is_on_host:
            self._staging, self._staging_address = device.pinned.take(max(1, size_bytes))

    def reserve(self, size_bytes: int) -> bool:
        """Make room for ``size_bytes``. Return True if the address has changed. Raises `BackendError`."""
        if self.address and size_bytes <= self._size_bytes:
            return False
        size_bytes = max(1, size_bytes)
        if self.tensor.is_on_host:
            room = np.zeros(size_bytes + _ALIGNMENT, np.uint8)
            begin = -address_of(room) % _ALIGNMENT
            self.values = room[begin : begin + size_bytes]
            self.address = address_of(self.values)
        else:
            self._device.free(self.address)
            self.address = 0
            self.address = self._device.allocate(size_bytes)
        self._size_bytes = size_bytes
        return True

    def stage(self, array: npt.NDArray[np.generic]) -> int:
        """Copy the contiguous ``array`` to the pinned memory. Return the address; 0 if this input is not staged.

        A small copy holds the interpreter's lock, a large one releases it.
        """
        if self._staging is None:
            return 0
        size = array.nbytes
        if size > _SMALL_BYTES:
            ctypes.memmove(self._staging_address, address_of(array), size)
        else:
            self._staging.data[:size] = array.reshape(-1).view(np.uint8).data
        return self._staging_address

    def clear(self, stream: CudaStream) -> None:
        """Start filling it with zeros, if it is on the device."""
        if not self.tensor.is_on_host:
            stream.clear(self.address, self._size_bytes)

    def close(self) -> None:
        if not self.tensor.is_on_host:
            self._device.free(self.address)
        self.address = self._staging_address = 0
        self._staging = self.values = None


class GrowingOutput:
    """An output whose size is known only during the execution, when TensorRT requests the memory.

    ``shape`` is its last shape, and ``address`` the start of the output.
    """

    def __init__(self, device: CudaDevice, tensor: PlanTensor, failed: Callable[[Exception], None]) -> None:
        self._buffer = TensorBuffer(device, tensor, 1, False)
        self._failed = failed
        self.shape: Shape = ()

    @property
    def address(self) -> int:
        return self._buffer.address

    def allocate(self, size_bytes: int) -> int:
        """Return the address of ``size_bytes``; 0 without memory, for which TensorRT reports an error."""
        try:
            self._buffer.reserve(size_bytes)
        except Exception as error:  # called by TensorRT, which cannot handle exceptions
            self._failed(error)
            return 0
        return self._buffer.address

    def set_shape(self, shape: Shape) -> None:
        self.shape = shape

    def close(self) -> None:
        self._buffer.close()


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Return the address of the first element of ``array``."""
    address: int = array.__array_interface__["data"][0]
    return address
