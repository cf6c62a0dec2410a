"""The ``contents`` of input tensors in large messages, read from the wire in slices.

Protobuf would make a list of all elements, holding the interpreter's lock meanwhile, and NumPy an
array of that list. Packed numbers are read by NumPy alone here; whatever else is handed to protobuf
a slice at a time. Source: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from headrace.frontends.grpc.grpc_service_pb2 import InferTensorContents
from headrace.frontends.grpc.wire import FIXED_SIZES, LENGTH_DELIMITED, Buffer, Span, read_varint
from headrace.large import SLICE_BYTES
from headrace.messages.tensor import BytesTensor

Values: TypeAlias = "npt.NDArray[Any] | memoryview"

#: A packed field below this is left to protobuf.
_PACKED_BYTES = 1024
_FIELDS = {field.number: field for field in InferTensorContents.DESCRIPTOR.fields}
_NUMPY: dict[str, npt.DTypeLike] = {
    "bool_contents": np.bool_,
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
    "fp32_contents": np.float32,
    "fp64_contents": np.float64,
}
_MALFORMED = "malformed contents"


def read(body: Buffer, spans: Sequence[Span]) -> dict[str, Values]:
    """The elements of each field that ``spans`` of ``body`` have: numbers, or strings in wire form.

    Raises `DecodeError`.
    """
    found: dict[str, list[Values]] = {}
    for span in spans:
        for name, values in _parts(memoryview(body)[span.begin : span.end]):
            found.setdefault(name, []).append(values)
    return {name: _joined(parts) for name, parts in found.items()}


def _joined(parts: list[Values]) -> Values:
    if len(parts) == 1:
        return parts[0]
    texts = [part for part in parts if isinstance(part, memoryview)]
    return memoryview(b"".join(texts)) if texts else np.concatenate(parts)


def _parts(contents: memoryview) -> Iterator[tuple[str, Values]]:
    position, end = 0, len(contents)
    begin = 0  # of what protobuf will read
    try:
        while position < end:
            field = position
            tag, position = read_varint(contents, position)
            kind = tag & 7
            if kind == LENGTH_DELIMITED:
                size, position = read_varint(contents, position)
                position += size
                found = _FIELDS.get(tag >> 3)
                if size >= _PACKED_BYTES and found is not None and found.name in _NUMPY:
                    if position > end:
                        break
                    yield from _slice(contents[begin:field])
                    yield found.name, _packed(contents[position - size : position], np.dtype(_NUMPY[found.name]))
                    begin = position
            elif kind == 0:
                position = read_varint(contents, position)[1]
            else:
                position += FIXED_SIZES[kind]
            if position - begin > SLICE_BYTES and position <= end:
                yield from _slice(contents[begin:position])
                begin = position
    except (IndexError, KeyError):
        raise DecodeError(_MALFORMED) from None
    if position != end:
        raise DecodeError(_MALFORMED)
    yield from _slice(contents[begin:end])


def _slice(wire: memoryview) -> Iterator[tuple[str, Values]]:
    """What protobuf finds in whole fields."""
    contents = InferTensorContents.FromString(wire)  # type: ignore[arg-type]  # a memoryview is taken, too
    for field, values in contents.ListFields():
        if field.name in _NUMPY:
            yield field.name, np.fromiter(values, _NUMPY[field.name], len(values))
        else:
            yield field.name, BytesTensor.from_items(values, (len(values),)).buffer


def _packed(wire: memoryview, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if dtype.kind == "f":
        if len(wire) % dtype.itemsize:
            raise DecodeError(_MALFORMED)
        floats: npt.NDArray[Any] = np.frombuffer(wire, dtype).copy()  # at an aligned address
        return floats
    content = np.frombuffer(wire, np.uint8)
    if content[-1] >= 0x80:
        raise DecodeError(_MALFORMED)
    slices = range(0, len(content), SLICE_BYTES)
    count = sum(int(np.count_nonzero(content[at : at + SLICE_BYTES] < 0x80)) for at in slices)
    numbers, filled = np.empty(count, dtype), 0
    for values in _varints(content):
        # Longer ones are cut to the width of the field, as protobuf does it.
        numbers[filled : filled + len(values)] = values != 0 if dtype.kind == "b" else values.astype(dtype)
        filled += len(values)
    return numbers


def _varints(content: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint64]]:
    """The numbers in ``content``, whose last byte ends one, a slice at a time."""
    at = 0
    while at < len(content):
        part = content[at : at + SLICE_BYTES]
        ends = np.flatnonzero(part < 0x80)
        if not len(ends):
            raise DecodeError(_MALFORMED)
        at += int(ends[-1]) + 1
        begins = np.append(0, ends[:-1] + 1)
        sizes = ends - begins + 1
        longest = int(sizes.max())
        if longest > 10:
            raise DecodeError(_MALFORMED)
        values = (part[begins] & 0x7F).astype(np.uint64)
        for place in range(1, longest):
            long = np.flatnonzero(sizes > place)
            values[long] |= (part[begins[long] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        yield values
