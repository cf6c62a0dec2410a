"""Tensors: NumPy arrays, and strings that stay in wire form.

A `Tensor` is either an ``np.ndarray`` (every fixed-size data type, BF16 as
``ml_dtypes.bfloat16``) or a `BytesTensor`. Both have ``shape`` and both are immutable in
spirit: an input belongs to its request, and a backend that wants to write makes a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument
from penstock.messages import dtypes
from penstock.messages.dtypes import DataType

_LENGTH = Struct("<I")
#: Offsets up to which a loop is faster than a call for all.
_FEW = 64
#: Sizes in bytes for which guessing the offsets pays, and takes a bounded amount of memory.
_GUESSED = range(1024, 1 << 28)


class BytesTensor:
    """Strings in the wire form of the protocol, boxed only when somebody asks.

    ``buffer`` holds, for each element in row-major order, its length as a little-endian uint32
    and then its bytes (behaviours.md section 3.1). ``offsets`` i64[elements + 1] are the
    positions of the length words, and the end; they are found once, on first use.
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
        """Encode an array of ``str`` or ``bytes``; text is UTF-8. One pass, one copy."""
        array = np.asarray(values, dtype=np.object_)
        items: list[object] = array.ravel().tolist()
        return cls.from_items([item if isinstance(item, bytes) else str(item).encode() for item in items], array.shape)

    @classmethod
    def from_items(cls, items: Sequence[bytes], shape: Sequence[int]) -> BytesTensor:
        """Join ``items``, in row-major order, into wire form. One copy."""
        lengths = list(map(len, items))
        words = {length: _LENGTH.pack(length) for length in set(lengths)}
        parts = [b""] * (2 * len(lengths))
        parts[::2] = [words[length] for length in lengths]
        parts[1::2] = items
        return cls(b"".join(parts), shape)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Positions of the length words, and the end; raises `InvalidArgument` if malformed."""
        if self._offsets is None:
            found = _guess(self.buffer) if self.buffer.nbytes in _GUESSED else None
            self._offsets = self._scan() if found is None else found
        return self._offsets

    @property
    def size(self) -> int:
        """Number of elements that the shape asks for."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in wire form, length words included."""
        return self.buffer.nbytes

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def items(self) -> list[bytes]:
        """All elements in row-major order. Copies every string."""
        offsets = self.offsets
        if len(offsets) <= _FEW:
            raw = bytes(self.buffer)
            return [raw[begin + 4 : end] for begin, end in pairwise(offsets.tolist())]
        # One call that cuts all of them, half the time of a slice per string.
        lengths = (np.diff(offsets) - 4).tolist()
        cuts = {length: f"4x{length}s" for length in set(lengths)}
        return list(Struct("<" + "".join([cuts[length] for length in lengths])).unpack(self.buffer))

    def to_objects(self) -> npt.NDArray[np.object_]:
        """The elements as ``bytes`` in an object array of this shape. Boxes every string."""
        array = np.empty(self.size, dtype=np.object_)
        array[:] = self.items()
        return array.reshape(self.shape)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.to_objects() if dtype is None else self.to_objects().astype(dtype)

    def reshape(self, shape: Sequence[int]) -> BytesTensor:
        """The same elements under another shape; shares the buffer."""
        return BytesTensor(self.buffer, shape, self._offsets)

    def rows(self, begin: int, end: int) -> BytesTensor:
        """Rows ``begin:end`` of the first axis; shares the buffer."""
        per_row = prod(self.shape[1:])
        offsets = self.offsets[begin * per_row : end * per_row + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return BytesTensor(self.buffer[first:last], (end - begin, *self.shape[1:]), offsets - first)

    def __repr__(self) -> str:
        return f"BytesTensor(shape={list(self.shape)}, nbytes={self.nbytes})"

    def _scan(self) -> npt.NDArray[np.int64]:
        buffer, position, end = self.buffer, 0, self.buffer.nbytes
        unpack, offsets = _LENGTH.unpack_from, [0]
        while position < end:
            if end - position < 4:
                raise InvalidArgument(
                    f"incomplete string length indicator, expecting 4 bytes but only {end - position} bytes available"
                )
            position += 4 + unpack(buffer, position)[0]
            offsets.append(position)
        if position != end:
            raise InvalidArgument(
                f"string element {len(offsets) - 2} runs {position - end} bytes past the end of the data"
            )
        return np.asarray(offsets, dtype=np.int64)


Tensor: TypeAlias = "npt.NDArray[Any] | BytesTensor"


def data_type(tensor: Tensor) -> DataType:
    """The data type of ``tensor``; raises `InvalidArgument` for a dtype the protocol lacks."""
    if isinstance(tensor, BytesTensor):
        return dtypes.BYTES
    found = dtypes.BY_NUMPY.get(tensor.dtype)
    if found is None:
        raise InvalidArgument(f"dtype {tensor.dtype} has no counterpart among {', '.join(dtypes.BY_NAME)}")
    return found


def as_tensor(value: npt.ArrayLike | BytesTensor) -> Tensor:
    """``value`` as a tensor: arrays pass through, strings and objects become wire form."""
    if isinstance(value, BytesTensor):
        return value
    array = np.asarray(value)
    if array.dtype.kind in "SUOT":
        return BytesTensor.from_objects(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def wire_view(tensor: Tensor) -> memoryview:
    """The bytes of ``tensor`` as the protocol carries them: little-endian, row-major.

    A view when the tensor is contiguous, which is the rule; a copy when it is not.
    """
    if isinstance(tensor, BytesTensor):
        return tensor.buffer
    if not tensor.flags.c_contiguous:
        tensor = np.ascontiguousarray(tensor)
    # Through uint8, because BF16 and zero-size arrays do not export a castable buffer.
    return tensor.reshape(-1).view(np.uint8).data if tensor.size else memoryview(b"")


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Stack along the first axis. Copies every element once."""
    first = tensors[0]
    if not isinstance(first, BytesTensor):
        return np.concatenate(tensors)
    strings = [tensor for tensor in tensors if isinstance(tensor, BytesTensor)]
    rows = sum(tensor.shape[0] for tensor in strings)
    lengths = np.concatenate([np.diff(tensor.offsets) for tensor in strings])
    buffer = b"".join([tensor.buffer for tensor in strings])
    return BytesTensor(buffer, (rows, *first.shape[1:]), _ends(lengths))


def _guess(buffer: memoryview) -> npt.NDArray[np.int64] | None:
    """The offsets of strings below 256 bytes, a tenth of the time of walking from one to the next.

    A length word of such a string is where three bytes in a row are zero, and of two such places
    side by side the second. Strings with zeros in them may look like that, too: the places are the
    offsets if, and only if, each leads to the next and the last to the end. None where they do not.
    """
    raw = np.frombuffer(buffer, np.uint8)
    zero = raw == 0
    begins = np.flatnonzero(zero[1:-2] & zero[2:-1] & zero[3:])
    begins = begins[np.append(np.diff(begins) > 1, True)] if begins.size else begins
    offsets = np.append(begins, raw.size)
    leads = offsets[0] == 0 and np.array_equal(begins + 4 + raw[begins], offsets[1:])
    return offsets if leads else None


def _ends(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where strings that take ``sizes`` bytes in wire form begin, and the end."""
    offsets = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
