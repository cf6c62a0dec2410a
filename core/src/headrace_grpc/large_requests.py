"""Large messages: scanned before protobuf creates their objects. Runs on a thread.

Two bytes on the wire may become an object of a hundred bytes, and protobuf holds the interpreter's lock until all are
created. So the contents of tensors are not parsed, and the rest of a large message must be small. Strings may be long,
because each is one object.

Contents are read from the wire in slices: packed numbers by NumPy alone, everything else by protobuf. Source:
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from headrace.errors import InvalidArgument
from headrace.messages.request import MAX_INPUTS
from headrace.messages.tensor import BytesTensor
from headrace.off_loop import SLICE_BYTES
from headrace_grpc.grpc_service_pb2 import InferTensorContents, ModelInferRequest
from headrace_grpc.wire import FIXED_SIZES, LENGTH_DELIMITED, Buffer, RawRequest, Span, read_varint, varint

M = TypeVar("M", bound=Message)

#: Smaller fields are not scanned, and count as short.
_LONG_BYTES = 4096
#: The maximum size of a large message without long strings and contents of tensors.
MAX_SHORT_BYTES = 1 << 20
_REQUEST, _INPUT = ModelInferRequest.DESCRIPTOR.full_name, ModelInferRequest.InferInputTensor.DESCRIPTOR.full_name
_RAW, _INPUTS, _CONTENTS = f"{_REQUEST}.raw_input_contents", f"{_REQUEST}.inputs", f"{_INPUT}.contents"
#: The field ``contents``, empty.
_NO_CONTENTS = b"\x2a\0"
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

Values: TypeAlias = "npt.NDArray[Any] | memoryview"

#: A smaller packed field is parsed by protobuf.
_PACKED_BYTES = 1024
_CONTENT_FIELDS = {field.number: field for field in InferTensorContents.DESCRIPTOR.fields}
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


def unpack_large(body: Buffer) -> RawRequest:
    """Return the ``ModelInferRequest`` in ``body``. The contents of its tensors stay in ``body``.

    Raises `DecodeError`, and `InvalidArgument` if the rest has more than `MAX_SHORT_BYTES`.
    """
    walk = _FieldWalk(memoryview(body))
    rest = walk.rest(0, len(body), ModelInferRequest.DESCRIPTOR)
    return RawRequest(ModelInferRequest.FromString(b"".join(rest)), walk.raw, body, walk.contents)


def bounded_parser(message: type[M]) -> Callable[[Buffer], M]:
    """Return a function that parses another kind of message, with the same limit."""

    def parse(body: Buffer) -> M:
        _FieldWalk(memoryview(body)).rest(0, len(body), message.DESCRIPTOR)
        return message.FromString(body)  # type: ignore[arg-type]  # a memoryview is taken, too

    return parse


class _FieldWalk:
    """The result of a scan of a message."""

    def __init__(self, view: memoryview) -> None:
        self.raw: list[bytes | memoryview] = []
        self.contents: dict[int, list[Span]] = {}
        self._view = view
        self._inputs = self._short_bytes = 0

    def rest(self, begin: int, end: int, descriptor: Any) -> list[Buffer]:
        """Return ``view[begin:end]``, a message with ``descriptor``, without contents of tensors."""
        view, parts, kept = self._view, list[Buffer](), begin
        for number, field, content, stop in _fields(view, begin, end):
            found = descriptor.fields_by_number.get(number) if content >= 0 else None
            name = "" if found is None else found.full_name
            if name == _RAW:
                if len(self.raw) == MAX_INPUTS:
                    raise InvalidArgument(f"request has more than {MAX_INPUTS} raw input contents")
                self.raw.append(view[content:stop])
                parts.append(view[kept:field])
                kept = stop
                continue
            self._inputs += name == _INPUTS
            if content >= 0 and stop - content > _LONG_BYTES:
                if name == _CONTENTS:
                    self.contents.setdefault(self._inputs - 1, []).append(Span(field, content, stop))
                    parts += (view[kept:field], _NO_CONTENTS)
                    kept = stop
                    continue
                if found is not None and found.message_type is not None:
                    inner = self.rest(content, stop, found.message_type)
                    if len(inner) > 1:
                        tag = varint(number << 3 | LENGTH_DELIMITED)
                        parts += (view[kept:field], tag, varint(sum(map(len, inner))), *inner)
                        kept = stop
                    continue
                if found is None or found.type in _TEXTS:
                    continue
            self._count(stop - field)
        parts.append(view[kept:end])
        return parts

    def _count(self, size_bytes: int) -> None:
        self._short_bytes += size_bytes
        if self._short_bytes > MAX_SHORT_BYTES:
            raise InvalidArgument(
                f"the message has more than {MAX_SHORT_BYTES} bytes besides long strings and the contents of tensors"
            )


def _fields(view: memoryview, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, start, start of the content (-1 for a number), and end of each field."""
    position = begin
    try:
        while position < end:
            field = position
            tag, position = read_varint(view, position)
            kind, content = tag & 7, -1
            if kind == LENGTH_DELIMITED:
                size, content = read_varint(view, position)
                position = content + size
            elif kind == 0:
                position = read_varint(view, position)[1]
            else:
                position += FIXED_SIZES[kind]
            if position > end:
                raise DecodeError("truncated message")
            yield tag >> 3, field, content, position
    except (IndexError, KeyError):
        raise DecodeError("malformed message") from None


# ---------------------------------------------------------------------- contents


def read_contents(body: Buffer, spans: Sequence[Span]) -> dict[str, Values]:
    """Return the elements of each field in ``spans`` of ``body``: numbers, or strings in wire form.

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
    begin = 0  # of the fields for protobuf
    try:
        while position < end:
            field = position
            tag, position = read_varint(contents, position)
            kind = tag & 7
            if kind == LENGTH_DELIMITED:
                size, position = read_varint(contents, position)
                position += size
                found = _CONTENT_FIELDS.get(tag >> 3)
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
    """Yield the elements of whole fields, parsed by protobuf."""
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
        # Longer ones are cut to the width of the field, as by protobuf.
        numbers[filled : filled + len(values)] = values != 0 if dtype.kind == "b" else values.astype(dtype)
        filled += len(values)
    return numbers


def _varints(content: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield the numbers in ``content``, which ends with a complete one, in slices."""
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
