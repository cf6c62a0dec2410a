"""Tensors: NumPy arrays, and strings that stay in wire form.

A `Tensor` is either an ``np.ndarray`` (every data type of fixed size, BF16 as ``ml_dtypes.bfloat16``) or a
`BytesTensor`. Treat both as read-only: an input belongs to its request, and a backend that writes to it must copy it
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidArgument
from headrace.messages import dtypes, strings
from headrace.messages.dtypes import DataType


class BytesTensor:
    """Strings in the wire form of the protocol. Python objects are made only on request.

    ``buffer`` holds, for each element in row-major order, its length as a little-endian uint32 and then its bytes
    (docs/spec/behaviours.md section 3.1). ``offsets`` i64[elements + 1] are the positions of the lengths, and the end;
    they are computed on first use.
    """

    __slots__ = ("_offsets", "buffer", "shape")

    def __init__(
        self, buffer: bytes | bytearray | memoryview, shape: Sequence[int], offsets: npt.NDArray[np.int64] | None = None
    ) -> None:
        self.buffer = memoryview(buffer)
        self.shape = tuple(shape)
        self._offsets = offsets

    @classmethod
    def from_objects(cls, values: npt.ArrayLike) -> BytesTensor:
        """Encode an array of ``str`` or ``bytes``; text is UTF-8."""
        array = np.asarray(values, dtype=np.object_)
        return cls.from_items(_encode(array.ravel().tolist()), array.shape)

    @classmethod
    def from_items(cls, items: Sequence[bytes], shape: Sequence[int]) -> BytesTensor:
        """Join ``items``, in row-major order, into wire form. One copy."""
        buffer, offsets = strings.join(items)
        return cls(buffer, shape, offsets)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The positions of the lengths, and the end. Raises `InvalidArgument` if the buffer is malformed."""
        if self._offsets is None:
            self._offsets = _checked(self.buffer, strings.find(self.buffer))
        return self._offsets

    @property
    def size(self) -> int:
        """The number of elements of the shape."""
        return prod(self.shape)

    @property
    def is_complete(self) -> bool:
        """True if the buffer is well-formed and has as many strings as the shape has elements."""
        try:
            return len(self.offsets) == self.size + 1
        except InvalidArgument:
            return False

    @property
    def nbytes(self) -> int:
        """The number of bytes in wire form, lengths included."""
        return self.buffer.nbytes

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def items(self) -> list[bytes]:
        """Return all elements in row-major order. Copies every string."""
        return strings.split(self.buffer, self.offsets)

    def to_objects(self) -> npt.NDArray[np.object_]:
        """Return the elements as ``bytes`` in an object array of this shape. Copies every string."""
        array = np.empty(self.size, dtype=np.object_)
        array[:] = self.items()
        return array.reshape(self.shape)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.to_objects() if dtype is None else self.to_objects().astype(dtype)

    def reshape(self, shape: Sequence[int]) -> BytesTensor:
        """Return the same elements in another shape. Shares the buffer."""
        return BytesTensor(self.buffer, shape, self._offsets)

    def rows(self, begin: int, end: int) -> BytesTensor:
        """Return rows ``begin:end`` of the first axis. Shares the buffer."""
        per_row = prod(self.shape[1:])
        offsets = self.offsets[begin * per_row : end * per_row + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return BytesTensor(self.buffer[first:last], (end - begin, *self.shape[1:]), offsets - first)

    def __repr__(self) -> str:
        return f"BytesTensor(shape={list(self.shape)}, nbytes={self.nbytes})"


#: For a tensor of fewer bytes, a copy is faster than a view.
SMALL_BYTES = 4096

Tensor: TypeAlias = "npt.NDArray[Any] | BytesTensor"


def data_type(tensor: Tensor) -> DataType:
    """Return the data type of ``tensor``. Raises `InvalidArgument` for a dtype that the protocol lacks."""
    if isinstance(tensor, BytesTensor):
        return dtypes.BYTES
    datatype = dtypes.BY_NUMPY.get(tensor.dtype)
    if datatype is None:
        raise InvalidArgument(f"dtype {tensor.dtype} has no counterpart among {', '.join(dtypes.BY_NAME)}")
    return datatype


#: The dtype object of each data type. NumPy has other objects that are equal to it: ``longlong`` equals ``int64``.
#: Engines distinguish them by number or character, and refuse one of the two.
_CANONICAL = {datatype.numpy: datatype.numpy for datatype in dtypes.ALL if datatype is not dtypes.BYTES}


def as_tensor(value: npt.ArrayLike | BytesTensor) -> Tensor:
    """Return ``value`` as a tensor: strings and objects in wire form, other arrays with the dtype of `_CANONICAL`.

    An array is only copied if its byte order is not the machine's. All arrays from outside are converted here: outputs
    of backends, and the inputs of `headrace.Server.infer`.
    """
    if isinstance(value, BytesTensor):
        return value
    array = np.asarray(value)
    dtype = array.dtype
    canonical = _CANONICAL.get(dtype)
    if canonical is dtype:
        return array
    if canonical is not None:
        return array.view(canonical)
    if dtype.kind in "SUOT":
        return BytesTensor.from_objects(array)
    return array if dtype.isnative else as_tensor(array.astype(dtype.newbyteorder("=")))


def wire_view(tensor: Tensor) -> memoryview:
    """Return the bytes of ``tensor`` as the protocol carries them: little-endian, row-major.

    They are a view if the tensor is contiguous, which is usual, and else a copy.
    """
    if isinstance(tensor, BytesTensor):
        return tensor.buffer
    if not tensor.flags.c_contiguous:
        tensor = np.ascontiguousarray(tensor)
    # Through uint8, because BF16 and zero-size arrays do not export a castable buffer.
    return tensor.reshape(-1).view(np.uint8).data if tensor.size else memoryview(b"")


def wire_bytes(tensor: Tensor) -> bytes | memoryview:
    """Return `wire_view`, or, for a small array, a copy: it costs a tenth of a view."""
    if tensor.nbytes < SMALL_BYTES and not isinstance(tensor, BytesTensor):
        return tensor.tobytes()
    return wire_view(tensor)


#: Up to this many bytes are copied without releasing the GIL, in 20 us: to get it back from a busy event loop may take
#: ten times as long.
_COPIED_AT_ONCE = 1 << 18


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate ``tensors`` along the first axis. All must have the same data type and the same other dims. Copies
    every element once."""
    first = tensors[0]
    if not isinstance(first, BytesTensor):
        return _stacked(tensors, first)  # type: ignore[arg-type]  # all are of one kind
    parts = [tensor for tensor in tensors if isinstance(tensor, BytesTensor)]
    rows = sum(part.shape[0] for part in parts)
    offsets = strings.ends(np.concatenate([np.diff(part.offsets) for part in parts]))
    return BytesTensor(b"".join([part.buffer for part in parts]), (rows, *first.shape[1:]), offsets)


def _stacked(arrays: Sequence[npt.NDArray[Any]], first: npt.NDArray[Any]) -> npt.NDArray[Any]:
    stacked: npt.NDArray[Any]
    if sum([array.nbytes for array in arrays]) <= _COPIED_AT_ONCE:
        try:
            joined = bytearray().join(arrays)  # type: ignore[arg-type]  # typeshed's arrays are buffers from 3.12 on
        except (TypeError, ValueError):  # BF16 arrays have no buffer, and arrays in another order no C-contiguous one
            pass
        else:
            stacked = np.ndarray((sum(map(len, arrays)), *first.shape[1:]), first.dtype, joined)
            return stacked
    stacked = np.concatenate(arrays)
    return stacked


def _encode(items: list[Any]) -> list[bytes]:
    kinds = set(map(type, items))
    if kinds == {bytes}:
        return items
    if kinds == {str}:
        return list(map(str.encode, items))
    return [item if isinstance(item, bytes) else str(item).encode() for item in items]


def _checked(buffer: memoryview, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ``offsets`` if they cover ``buffer``. Raises `InvalidArgument` that describes the bytes after them."""
    rest = buffer.nbytes - int(offsets[-1])
    if 0 < rest < 4:
        raise InvalidArgument(f"incomplete string length indicator, expecting 4 bytes but only {rest} bytes available")
    if rest:
        missing = 4 + int.from_bytes(buffer[-rest:][:4], "little") - rest
        raise InvalidArgument(f"string element {len(offsets) - 1} runs {missing} bytes past the end of the data")
    return offsets
