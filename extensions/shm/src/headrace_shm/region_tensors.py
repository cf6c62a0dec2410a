"""Inputs in the memory of a GPU, for models that take them there: `headrace.DeviceTensor`s that pass by DLPack.

A capsule of DLPack holds a ``DLManagedTensor`` (dlpack.h, version 0.8). NumPy makes the capsules, over addresses that
it never reads, so the memory is kept and released in C. Device and data type are written into the structure here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace import DeviceTensor, dtypes

#: Type code and bits of each data type, as dlpack.h has them.
_CODES: Mapping[np.dtype[Any], tuple[int, int]] = {
    dtypes.INT8.numpy: (0, 8),
    dtypes.INT16.numpy: (0, 16),
    dtypes.INT32.numpy: (0, 32),
    dtypes.INT64.numpy: (0, 64),
    dtypes.UINT8.numpy: (1, 8),
    dtypes.UINT16.numpy: (1, 16),
    dtypes.UINT32.numpy: (1, 32),
    dtypes.UINT64.numpy: (1, 64),
    dtypes.FP16.numpy: (2, 16),
    dtypes.FP32.numpy: (2, 32),
    dtypes.FP64.numpy: (2, 64),
    dtypes.BF16.numpy: (4, 16),
    dtypes.BOOL.numpy: (6, 8),
}


class _TensorDescriptor(Structure):
    """``DLTensor`` of dlpack.h."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


_get_pointer = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


class AddressedMemory(Protocol):
    """Memory of a device, kept as long as there is this object. Any thread."""

    #: The kind of the device in DLPack's numbers, and its own number.
    device: tuple[int, int]

    def address(self, offset: int) -> int:
        """Return the address of the byte at ``offset``."""

    def copy(self, offset: int, size: int) -> memoryview:
        """Return a copy of bytes in the memory of the host."""


class RegionTensor(DeviceTensor):
    """A tensor whose first byte is at ``offset`` of ``memory``, contiguous. Complete: its client wrote it before."""

    __slots__ = ("_memory", "_offset")

    def __init__(self, memory: AddressedMemory, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        super().__init__(shape, dtype)
        self._memory, self._offset = memory, offset

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.device

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        capsule = np.asarray(_Unread(self._memory, self._offset, self.shape, self.dtype)).__dlpack__()
        tensor = _tensor(capsule)
        tensor.device_type, tensor.device_id = self._memory.device
        tensor.code, tensor.bits = _CODES[self.dtype]
        return capsule

    def copy_to_host(self) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = np.frombuffer(self._memory.copy(self._offset, self.nbytes), self.dtype)
        return array.reshape(self.shape)

    def view(self, rows: slice, shape: Sequence[int]) -> RegionTensor:
        begin = rows.indices(self.shape[0])[0] if rows != slice(None) else 0
        offset = self._offset + begin * prod(self.shape[1:]) * self.dtype.itemsize
        return RegionTensor(self._memory, offset, shape, self.dtype)


class _Unread:
    """The owner of an array that is never read: it keeps ``memory`` as long as there is a capsule of the array."""

    def __init__(self, memory: AddressedMemory, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._memory = memory
        data = memory.address(offset), False
        typestr = np.dtype(f"u{dtype.itemsize}").str
        self.__array_interface__ = {"version": 3, "data": data, "shape": shape, "typestr": typestr}


def address_of(capsule: Any) -> int | None:
    """Return the address of the tensor in ``capsule``, or None if its rows are not one after the other."""
    tensor = _tensor(capsule)
    shape, strides, expected = tensor.shape[: tensor.ndim], tensor.strides, 1
    for axis in reversed(range(tensor.ndim if strides else 0)):
        if shape[axis] != 1 and strides[axis] != expected:  # that of an axis of one element says nothing
            return None
        expected *= shape[axis]
    return int(tensor.data) + int(tensor.byte_offset)


def _tensor(capsule: Any) -> _TensorDescriptor:
    return _TensorDescriptor.from_address(_get_pointer(capsule, b"dltensor"))
