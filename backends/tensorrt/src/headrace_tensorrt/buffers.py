"""The memory of an instance's inputs and outputs: on the device, or on the host for shape tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace_tensorrt.cuda import CudaDevice, CudaStream
from headrace_tensorrt.plan_shapes import PlanTensor, Shape

#: In bytes: the alignment that TensorRT requires of every address. Memory of the device always has it.
_ALIGNMENT = 256
#: The bytes that are copied in the time of one handover of the interpreter's lock.
_SMALL_BYTES = 1 << 18


class TensorBuffer:
    """The place of one input or output, as large as its largest shape. ``address`` may change in `reserve`.

    On the device, except for a tensor that TensorRT wants in the host's memory: then ``values`` is that place.
    An input may be staged (`stage`): then it is copied from pinned memory of the same size.
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
        """Return the address of ``array``, which has no gaps, in pinned memory, copied there; 0 if it is not staged.

        A small copy keeps the interpreter's lock, a large one lets other threads run.
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
        """Begin to fill it with zeros, if it is on the device."""
        if not self.tensor.is_on_host:
            stream.clear(self.address, self._size_bytes)

    def close(self) -> None:
        if not self.tensor.is_on_host:
            self._device.free(self.address)
        self.address = self._staging_address = 0
        self._staging = self.values = None


class GrowingOutput:
    """An output with a size that only the execution determines: TensorRT requests the memory while it executes.

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
        """Return the address of ``size_bytes``; 0 if there is no room, which TensorRT then says in its own way."""
        try:
            self._buffer.reserve(size_bytes)
        except Exception as error:  # called by TensorRT, which cannot handle exceptions
            self._failed(error)
            return 0
        return self._buffer.address

    def tell_shape(self, shape: Shape) -> None:
        self.shape = shape

    def close(self) -> None:
        self._buffer.close()


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Return the address of the first element of ``array``."""
    address: int = array.__array_interface__["data"][0]
    return address
