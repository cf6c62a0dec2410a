"""The data of input tensors: bytes, or lists of numbers, to a `Tensor`.

Source: docs/spec/behaviours.md section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidArgument
from headrace.frontends.grpc import long_contents
from headrace.frontends.grpc.grpc_service_pb2 import InferTensorContents
from headrace.frontends.grpc.wire import Buffer, Span
from headrace.large import UNBOUNDED, Large
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.request import Undecoded
from headrace.messages.tensor import BytesTensor, Tensor, wire_view

#: Of NumPy 2; nor may `prod` be asked about millions, whose product takes minutes.
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of ``InferTensorContents``, the type it is named for in errors, and those it takes."""

    name: str
    named: DataType
    takes: tuple[DataType, ...]
    numpy: npt.DTypeLike


_FIELDS = (
    _Field("bool_contents", dtypes.BOOL, (dtypes.BOOL,), np.bool_),
    _Field("int_contents", dtypes.INT32, (dtypes.INT8, dtypes.INT16, dtypes.INT32), np.int32),
    _Field("int64_contents", dtypes.INT64, (dtypes.INT64,), np.int64),
    _Field("uint_contents", dtypes.UINT32, (dtypes.UINT8, dtypes.UINT16, dtypes.UINT32), np.uint32),
    _Field("uint64_contents", dtypes.UINT64, (dtypes.UINT64,), np.uint64),
    _Field("fp32_contents", dtypes.FP32, (dtypes.FP32,), np.float32),
    _Field("fp64_contents", dtypes.FP64, (dtypes.FP64,), np.float64),
    _Field("bytes_contents", dtypes.BYTES, (dtypes.BYTES,), np.object_),
)


def from_bytes(
    datatype: str, shape: tuple[int, ...], buffer: bytes | memoryview, patience: int = UNBOUNDED
) -> Tensor | Undecoded:
    """The tensor whose wire bytes are ``buffer``: a view, never a copy.

    `Undecoded` if the type is unknown, or the bytes contradict the shape. Raises `Large` for strings of more
    than ``patience`` bytes, which will be looked for one by one.
    """
    found = dtypes.BY_NAME.get(datatype)
    if found is None or len(shape) > _MAX_DIMS or (shape and min(shape) < 0):
        return Undecoded(datatype, shape, memoryview(buffer))
    if not found.itemsize:
        if len(buffer) > patience:
            raise Large
        return BytesTensor(buffer, shape)
    if len(buffer) == prod(shape) * found.itemsize:
        try:
            return np.frombuffer(buffer, found.numpy).reshape(shape)
        except ValueError:  # more dims than this NumPy has, or zero elements in an impossible shape
            pass
    return Undecoded(datatype, shape, memoryview(buffer))


def from_contents(
    name: str, model: str, datatype: str, shape: tuple[int, ...], contents: InferTensorContents
) -> Tensor | Undecoded:
    """The tensor whose elements ``contents`` lists. Copies every element.

    Integers are truncated to their width. Raises `InvalidArgument` if more than one field is
    given, or one that does not belong to ``datatype``.
    """
    given = [field for field in _FIELDS if getattr(contents, field.name)]
    _check(given, name, model, datatype)
    return from_bytes(datatype, shape, _wire(given[0], datatype, contents) if given else b"")


def from_spans(
    name: str, model: str, datatype: str, shape: tuple[int, ...], body: Buffer, spans: Sequence[Span]
) -> Tensor | Undecoded:
    """`from_contents` for those that are left in ``spans`` of ``body``. Raises `DecodeError`, too."""
    found = long_contents.read(body, spans)
    given = [field for field in _FIELDS if field.name in found]
    _check(given, name, model, datatype)
    if not given:
        return from_bytes(datatype, shape, b"")
    values = found[given[0].name]
    if isinstance(values, memoryview):
        return from_bytes(datatype, shape, values)
    return from_bytes(datatype, shape, wire_view(values.astype(dtypes.BY_NAME[datatype].numpy, copy=False)))


def _check(given: Sequence[_Field], name: str, model: str, datatype: str) -> None:
    """Raise `InvalidArgument` unless only what belongs to ``datatype`` is given."""
    for number, field in enumerate(given):
        if number:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}', binary data was "
                "already supplied."
            )
        if datatype not in [taken.name for taken in field.takes]:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type "
                f"'{field.named}', expected datatype '{datatype}'"
            )


def _wire(field: _Field, datatype: str, contents: InferTensorContents) -> memoryview:
    values = getattr(contents, field.name)
    if field.named is dtypes.BYTES:
        return _strings(values)
    array = np.fromiter(values, field.numpy, len(values))
    return wire_view(array.astype(dtypes.BY_NAME[datatype].numpy, copy=False))


def _strings(values: Sequence[bytes]) -> memoryview:
    return BytesTensor.from_items(values, (len(values),)).buffer
