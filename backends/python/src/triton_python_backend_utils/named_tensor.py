"""A named tensor: a NumPy array, strings in wire form, or memory of a device.

Data types have Triton's numbers, Triton's names in a config, and NumPy's types.
Source: docs/spec/behaviours.md sections 3.1 and 9.2.

If a model returns strings unchanged, their wire form is looked up instead of encoded again. For a million strings,
encoding takes 0.25 s, and the comparison 0.01 s, because lists compare by identity first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace import BytesTensor, DataType, DeviceTensor, as_tensor, dtypes
from triton_python_backend_utils import dlpack
from triton_python_backend_utils.arguments import Text, text
from triton_python_backend_utils.dlpack import DeviceMemory
from triton_python_backend_utils.error import TritonModelException

# As in Triton, without BF16, which NumPy lacks.
_KNOWN = [dtype for dtype in dtypes.ALL if dtype is not dtypes.BF16]


def _scalar(dtype: DataType) -> type[Any]:
    return dtype.numpy.type


TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    dtype.config_name: bool if dtype is dtypes.BOOL else _scalar(dtype) for dtype in _KNOWN
}
_TYPES = {dtype.config_value: _scalar(dtype) for dtype in _KNOWN}
_NUMBERS = {dtype.numpy: dtype.config_value for dtype in _KNOWN} | {np.dtype(np.bytes_): dtypes.BYTES.config_value}


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """NumPy's type for ``TYPE_FP32``. Raises KeyError for an unknown name and for TYPE_BF16."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """NumPy's type for a number of `Tensor.triton_dtype`; None for one that NumPy lacks."""
    return _TYPES.get(data_type)


def numpy_to_triton_type(data_type: npt.DTypeLike) -> int | None:
    """Return Triton's number for a type or a dtype of NumPy; None for one that Triton lacks, and for anything else."""
    try:
        return None if data_type is None else _NUMBERS.get(np.dtype(data_type))
    except TypeError:
        return None


Array: TypeAlias = npt.NDArray[Any]

#: Global names, because every new tensor reads them.
_NDARRAY, _BY_NUMPY = np.ndarray, dtypes.BY_NUMPY.get


class Tensor:
    """``name`` and the elements of ``array``, which is not copied if it is C-contiguous.

    Arrays of objects, bytes and text become BYTES. Raises `TritonModelException` for an empty name
    and for a dtype that Triton lacks, TypeError for a name that is no text or an array that is none.
    """

    __slots__ = ("__weakref__", "_datatype", "_name", "_value")

    def __init__(self, name: Text, array: Array) -> None:
        if not isinstance(array, _NDARRAY):
            raise TypeError(f"Tensor takes a NumPy array, found type '{type(array).__name__}'")
        if type(name) is not str or not name:
            name = _checked_name(name)
        datatype = _BY_NUMPY(array.dtype)
        if datatype is None:
            array, datatype = _accepted(array)
        self._name = name
        self._datatype = datatype
        self._value: Array | BytesTensor | DeviceTensor = (
            array if array.flags.c_contiguous else np.ascontiguousarray(array)
        )

    @classmethod
    def from_dlpack(cls, name: Text, tensor: Any) -> Tensor:
        """Return the elements of a DLPack capsule, or of an object with ``__dlpack__``; shared, not copied.

        Raises `TritonModelException` for strides, and for a type or a device that Triton lacks.
        """
        named = _checked_name(name)
        value, datatype = dlpack.adopt(tensor)
        return cls._of(named, value, datatype)

    def name(self) -> str:
        return self._name

    def triton_dtype(self) -> int:
        """Return the number of the data type, as for `triton_to_numpy_type`."""
        return self._datatype.config_value

    def shape(self) -> list[int]:
        return list(self._value.shape)

    def as_numpy(self) -> Array:
        """Return the elements, the same array each time; for BYTES, an object array of ``bytes``.

        The array is writable: read-only elements, and elements that the server passes on a device, are copied once.
        Raises `TritonModelException` for BF16, and for tensors that the model created on a device.
        """
        value = self._value
        if isinstance(value, np.ndarray):
            if self._datatype is dtypes.BF16:
                raise TritonModelException(
                    "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
                )
            return value if value.flags.writeable else self._writable(value)
        if isinstance(value, BytesTensor):
            self._value = objects = _decode(value)
            return objects
        if not isinstance(value, DeviceMemory) and self._datatype is not dtypes.BF16:
            return value.to_host()
        raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")

    def is_cpu(self) -> bool:
        """True if the elements are in memory of the host."""
        return not isinstance(self._value, DeviceTensor)

    def to_dlpack(self) -> Any:
        """Return a capsule that shares the elements and keeps them alive. Raises `TritonModelException` for BYTES."""
        value = self._value
        if isinstance(value, DeviceTensor):
            return value.__dlpack__()
        if self._datatype is dtypes.BYTES or isinstance(value, BytesTensor):
            raise TritonModelException("DLPack does not have support for string tensors.")
        # ``carray``: contiguous and writable. A caller of `Server.infer` may have sent an array with gaps.
        return dlpack.capsule_of(value if value.flags.carray else self._writable(value), self._datatype)

    def __dlpack__(self, stream: int | None = None) -> Any:
        """Return `to_dlpack` for a framework. Pending work on the tensor precedes later work on ``stream``."""
        value = self._value
        return value.__dlpack__(stream=stream) if isinstance(value, DeviceTensor) else self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and number."""
        return self._value.__dlpack_device__() if isinstance(self._value, DeviceTensor) else (dlpack.CPU, 0)

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, {self._datatype}, shape={self.shape()})"

    def _writable(self, value: Array) -> Array:
        copy: Array = value.copy()
        self._value = copy
        return copy

    def _wire(self) -> Array | BytesTensor:
        """Return the elements to send. Strings are encoded. Memory of a device is copied to the host, unless the server
        accepts it.
        """
        value = self._value
        if isinstance(value, DeviceTensor):
            return value if dlpack.stays else value.to_host()  # type: ignore[return-value]  # as the server wants it
        if self._datatype is dtypes.BYTES and not isinstance(value, BytesTensor):
            return _encode(value)
        return value

    @classmethod
    def _received(cls, name: str, value: Array | BytesTensor) -> Tensor:
        """Return a tensor that the server has checked. Strings stay in wire form until they are read."""
        return cls._of(name, value, dtypes.BYTES if isinstance(value, BytesTensor) else dtypes.BY_NUMPY[value.dtype])

    @classmethod
    def _of(cls, name: str, value: Array | BytesTensor | DeviceTensor, datatype: DataType) -> Tensor:
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._value = value
        tensor._datatype = datatype
        return tensor


def _checked_name(value: Text) -> str:
    name = text(value, "the name of a Tensor")
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return name


def _accepted(array: Array) -> tuple[Array, DataType]:
    """Return text and bytes unchanged, and other arrays in this machine's byte order."""
    if array.dtype.kind in "SU":
        return array, dtypes.BYTES
    native = dtypes.BY_NUMPY.get(array.dtype.newbyteorder("="))
    if native is None:
        raise TritonModelException("NumPy dtype is not supported.")
    return array.astype(native.numpy), native


def read_only(value: Any) -> Array | BytesTensor:
    """Return ``value`` in the server's form, read-only, for a model in another thread. `Tensor.as_numpy` copies it."""
    if isinstance(value, DeviceTensor):
        return value  # type: ignore[return-value]  # as `_wire`
    tensor = as_tensor(value)
    if isinstance(tensor, BytesTensor):
        return tensor
    view: Array = tensor.view()
    view.flags.writeable = False
    return view


def named_among(tensors: Iterable[Tensor], name: str) -> Tensor | None:
    """Return the first tensor of that name; None if there is none."""
    for tensor in tensors:
        if tensor._name == name:
            return tensor
    return None


#: The least number of elements for which the comparison is faster than encoding.
_WORTH = 4096


@dataclass(frozen=True, slots=True)
class _Decoded:
    array: weakref.ref[npt.NDArray[Any]]
    items: list[bytes]
    wire: BytesTensor


#: By the identity of their arrays, as long as these exist.
_decoded: dict[int, _Decoded] = {}


def _decode(wire: BytesTensor) -> npt.NDArray[Any]:
    """Return the strings of ``wire`` in an object array of its shape. A large one keeps ``wire`` alive."""
    items = wire.items()
    flat = np.empty(len(items), np.object_)
    flat[:] = items
    array = flat.reshape(wire.shape)
    if len(items) >= _WORTH:
        key = id(array)
        _decoded[key] = _Decoded(weakref.ref(array, lambda _: _decoded.pop(key, None)), items, wire)
    return array


def _encode(array: npt.NDArray[Any]) -> BytesTensor:
    """Return ``array`` in wire form; text is UTF-8."""
    known = _decoded.get(id(array))
    if known is not None and known.array() is array and array.ravel().tolist() == known.items:
        return known.wire.reshape(array.shape)
    return BytesTensor.from_objects(array)


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> bytes | tuple[()] | None:
    """Return the elements of an array of objects or bytes in wire form, row by row; text as UTF-8.

    As in Triton, ``()`` for an array without elements, and None for an array of another type.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return bytes(BytesTensor.from_objects(input_tensor).buffer)


def deserialize_bytes_tensor(
    encoded_tensor: bytes | bytearray | memoryview | npt.NDArray[Any],
) -> npt.NDArray[np.object_]:
    """Return the strings of ``encoded_tensor`` as ``bytes``, in an object array of one dimension.

    Raises `headrace.errors.InvalidArgument` for bytes that are not in wire form.
    """
    tensor = BytesTensor(np.frombuffer(encoded_tensor, np.uint8).data, ())
    return tensor.reshape((len(tensor.offsets) - 1,)).to_objects()
