"""A named tensor: a NumPy array, strings in wire form, or memory of a device.

Source: behaviours.md section 9.2.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.messages import dtypes
from penstock.messages.tensor import BytesTensor
from triton_python_backend_utils.error import TritonModelException

Array: TypeAlias = npt.NDArray[Any]

_NUMBERS = {dtype.numpy: dtype.config_value for dtype in dtypes.ALL}
_BYTES = dtypes.BYTES.config_value
_BF16 = dtypes.BF16.config_value


class Tensor:
    """``name`` and the elements of ``array``, which is not copied if it is C-contiguous.

    Arrays of objects, bytes and text become BYTES. Raises `TritonModelException` for an empty name
    and for a dtype that Triton lacks, TypeError for what is no array.
    """

    __slots__ = ("__weakref__", "_dtype", "_name", "_objects", "_value")

    def __init__(self, name: str, array: Array) -> None:
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor takes a NumPy array, found type '{type(array).__name__}'")
        dtype = _NUMBERS.get(array.dtype)
        if dtype is None:
            array, dtype = _accepted(array)
        self._name = name
        self._dtype = dtype
        self._value: Array | BytesTensor = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        self._objects: Array | None = None

    def name(self) -> str:
        return self._name

    def triton_dtype(self) -> int:
        """The number of the data type, as `triton_to_numpy_type` takes it."""
        return self._dtype

    def shape(self) -> list[int]:
        return list(self._value.shape)

    def as_numpy(self) -> Array:
        """The elements; of BYTES, an object array of bytes. Raises `TritonModelException` for BF16."""
        value = self._value
        if isinstance(value, BytesTensor):
            if self._objects is None:
                self._objects = value.to_objects()
            return self._objects
        if self._dtype == _BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return value

    def is_cpu(self) -> bool:
        """Whether the elements are in memory of the host."""
        return True

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, shape={self.shape()})"

    def _wire(self) -> Array | BytesTensor:
        """The elements as they are sent: strings are encoded here, once."""
        value = self._value
        if self._dtype == _BYTES and not isinstance(value, BytesTensor):
            return BytesTensor.from_objects(value)
        return value

    @classmethod
    def _received(cls, name: str, value: Array | BytesTensor) -> Tensor:
        """A tensor that the server has checked. Strings stay in wire form until somebody asks."""
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._value = value
        tensor._objects = None
        tensor._dtype = _BYTES if isinstance(value, BytesTensor) else _NUMBERS[value.dtype]
        return tensor


def _accepted(array: Array) -> tuple[Array, int]:
    if array.dtype.kind in "SU":
        return array, _BYTES
    native = array.dtype.newbyteorder("=")
    if native not in _NUMBERS:
        raise TritonModelException("NumPy dtype is not supported.")
    return array.astype(native), _NUMBERS[native]
