"""Large messages, looked through before protobuf makes objects of them. Runs on a thread.

Two bytes on the wire may be an object of a hundred to protobuf, which holds the interpreter's lock until
all are made. So the contents of tensors stay where they are, and what else a large message has must be as
little as requests have. Strings may be long, because each is one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from headrace.errors import InvalidArgument
from headrace.frontends.grpc.grpc_service_pb2 import ModelInferRequest
from headrace.frontends.grpc.wire import FIXED_SIZES, LENGTH_DELIMITED, Buffer, RawRequest, Span, read_varint, varint
from headrace.messages.request import MAX_INPUTS

M = TypeVar("M", bound=Message)

#: Fields below this are not looked into, and count as short.
_LONG_BYTES = 4096
#: What a large message may have besides long strings and the contents of tensors.
MAX_SHORT_BYTES = 1 << 20
_REQUEST, _INPUT = ModelInferRequest.DESCRIPTOR.full_name, ModelInferRequest.InferInputTensor.DESCRIPTOR.full_name
_RAW, _INPUTS, _CONTENTS = f"{_REQUEST}.raw_input_contents", f"{_REQUEST}.inputs", f"{_INPUT}.contents"
#: The field ``contents`` without any.
_NO_CONTENTS = b"\x2a\0"
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def unpack(body: Buffer) -> RawRequest:
    """The ``ModelInferRequest`` in ``body``, but for the contents of its tensors, which stay in ``body``.

    Raises `DecodeError`, and `InvalidArgument` if it has more than `MAX_SHORT_BYTES` besides.
    """
    look = _Look(memoryview(body))
    rest = look.rest(0, len(body), ModelInferRequest.DESCRIPTOR)
    return RawRequest(ModelInferRequest.FromString(b"".join(rest)), look.raw, body, None, look.contents)


def parser(message: type[M]) -> Callable[[Buffer], M]:
    """Parses messages of another kind, with the same bound."""

    def parse(body: Buffer) -> M:
        _Look(memoryview(body)).rest(0, len(body), message.DESCRIPTOR)
        return message.FromString(body)  # type: ignore[arg-type]  # a memoryview is taken, too

    return parse


class _Look:
    """What a look through a message finds."""

    def __init__(self, view: memoryview) -> None:
        self.raw: list[bytes | memoryview] = []
        self.contents: dict[int, list[Span]] = {}
        self._view = view
        self._inputs = self._short_bytes = 0

    def rest(self, begin: int, end: int, descriptor: Any) -> list[Buffer]:
        """``view[begin:end]``, a message as ``descriptor`` says, without contents of tensors."""
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
    """Number, where it begins, where its content does (-1 for a number), and the end, of each field."""
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
