"""DLPack without any framework: reads capsules, and exports `headrace.DeviceTensor`s at an address.

A capsule of DLPack has a ``DLManagedTensor`` (dlpack.h, version 0.8, which every framework reads). NumPy creates the
capsules, for addresses that it never reads, so memory is kept and released in C. Device and data type are written into
the structure here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace import DataType, DeviceTensor, dtypes

#: The type code and the bits of each data type, from dlpack.h.
DLPACK_CODES: Mapping[DataType, tuple[int, int]] = {
    dtypes.INT8: (0, 8),
    dtypes.INT16: (0, 16),
    dtypes.INT32: (0, 32),
    dtypes.INT64: (0, 64),
    dtypes.UINT8: (1, 8),
    dtypes.UINT16: (1, 16),
    dtypes.UINT32: (1, 32),
    dtypes.UINT64: (1, 64),
    dtypes.FP16: (2, 16),
    dtypes.FP32: (2, 32),
    dtypes.FP64: (2, 64),
    dtypes.BF16: (4, 16),
    dtypes.BOOL: (6, 8),
}
#: NumPy's capsules have at most 32 axes in its versions before 2.
MOST_AXES = 32


class DLTensor(Structure):
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
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))


def is_dlpack(value: Any) -> bool:
    """True if ``value`` is a capsule of DLPack that has not been consumed."""
    return bool(_is_valid(value, b"dltensor"))


def dl_tensor(capsule: Any) -> DLTensor:
    """Return the structure in ``capsule``, valid as long as the capsule. Raises `ValueError` for other objects."""
    return DLTensor.from_address(_get_pointer(capsule, b"dltensor"))


def is_contiguous(tensor: DLTensor) -> bool:
    """True if ``tensor`` is row-major without gaps. Strides count elements; without strides it is row-major."""
    shape, strides, expected = tensor.shape[: tensor.ndim], tensor.strides, 1
    if not strides or 0 in shape:
        return True
    for axis in reversed(range(tensor.ndim)):
        if shape[axis] != 1 and strides[axis] != expected:  # the stride of an axis of one element has no meaning
            return False
        expected *= shape[axis]
    return True


def address_of(capsule: Any) -> int | None:
    """Return the address of the tensor in ``capsule``; None if it is not contiguous."""
    tensor = dl_tensor(capsule)
    return int(tensor.data or 0) + int(tensor.byte_offset) if is_contiguous(tensor) else None


class AddressedMemory(Protocol):
    """Memory of a device, which this object keeps alive. Any thread."""

    @property
    def device(self) -> tuple[int, int]:
        """DLPack's number of the kind of device, and the number of the device."""

    def address(self, offset: int) -> int:
        """Return the address of the byte at ``offset``."""

    def copy(self, offset: int, size: int) -> memoryview:
        """Return a copy of bytes in the memory of the host. Blocks."""


class AddressedTensor(DeviceTensor):
    """A contiguous tensor whose first byte is at ``offset`` of ``memory``. No work on it may be queued."""

    __slots__ = ("_memory", "_offset")

    def __init__(self, memory: AddressedMemory, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        super().__init__(shape, dtype)
        self._memory, self._offset = memory, offset

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.device

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        capsule = np.asarray(_Unread(self._memory, self._offset, self.shape, self.dtype)).__dlpack__()
        tensor = dl_tensor(capsule)
        tensor.device_type, tensor.device_id = self._memory.device
        tensor.code, tensor.bits = DLPACK_CODES[dtypes.BY_NUMPY[self.dtype]]
        return capsule

    def copy_to_host(self) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = np.frombuffer(self._memory.copy(self._offset, self.nbytes), self.dtype)
        return array.reshape(self.shape)

    def view(self, rows: slice, shape: Sequence[int]) -> AddressedTensor:
        begin = rows.indices(self.shape[0])[0] if rows != slice(None) else 0
        offset = self._offset + begin * prod(self.shape[1:]) * self.dtype.itemsize
        return AddressedTensor(self._memory, offset, shape, self.dtype)


class _Unread:
    """The owner of an array that is never read: it keeps ``memory`` alive as long as a capsule of the array."""

    def __init__(self, memory: AddressedMemory, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._memory = memory
        data = memory.address(offset), False
        typestr = np.dtype(f"u{dtype.itemsize}").str
        self.__array_interface__ = {"version": 3, "data": data, "shape": shape, "typestr": typestr}
