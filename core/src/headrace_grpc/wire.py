"""Requests without the copies of tensors that protobuf makes.

Protobuf copies a ``bytes`` field into its arena when it parses, again when Python reads it, and twice more on the way
out. That matters for raw contents only. So their wire form (https://protobuf.dev/programming-guides/encoding) is parsed
here and written in ``encode``. Protobuf handles all other fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from headrace.off_loop import LARGE_BYTES, TooLargeForLoop
from headrace_grpc.grpc_service_pb2 import ModelInferRequest

Buffer: TypeAlias = "bytes | memoryview"

#: Up to this size, protobuf's copies cost less than a walk over the fields in Python (about 1 us per field).
SPLIT_BYTES = 32 * 1024
#: In a message with more fields, protobuf copies the contents, because the event loop would wait for the walk.
SPLIT_FIELDS = 4096
#: The maximum size of a gRPC message, in either direction.
MESSAGE_BYTES = 2**31 - 1
#: Smaller requests do not count in the memory budget; each is one of the calls of a connection.
COUNTED_BYTES = 16 * 1024

LENGTH_DELIMITED = 2
_RAW_INPUT_TAG = 7 << 3 | LENGTH_DELIMITED
#: Bytes of a field of wire type 1 and 5.
FIXED_SIZES = {1: 8, 5: 4}


class Span(NamedTuple):
    """The places in a message of a field with contents, of the contents, and of their end."""

    field: int
    begin: int
    end: int


_NOTHING: Mapping[int, Sequence[Span]] = {}


class RawRequest(NamedTuple):
    """A ``ModelInferRequest``. Its raw contents are in ``raw``, and ``message`` may lack them.

    ``body`` is the received message. ``contents`` has, by number of input, the places in it of contents that
    ``message`` lacks.
    """

    message: ModelInferRequest
    raw: Sequence[bytes | memoryview]
    body: Buffer
    contents: Mapping[int, Sequence[Span]] = _NOTHING


def unpack(body: Buffer, loop_limit_bytes: int = LARGE_BYTES) -> RawRequest:
    """Parse a serialized ``ModelInferRequest``. Large raw contents are views of ``body``.

    Raises ``google.protobuf.message.DecodeError`` if ``body`` is malformed, and `TooLargeForLoop` if it has more than
    ``loop_limit_bytes`` beside raw contents: `large_requests.unpack_large` reads these.
    """
    if len(body) > SPLIT_BYTES:
        raw_request = split(body, loop_limit_bytes)
        if raw_request is not None:
            return raw_request
    message = ModelInferRequest.FromString(body)  # type: ignore[arg-type]  # a memoryview is taken, too
    return RawRequest(message, message.raw_input_contents, body)


def split(body: Buffer, loop_limit_bytes: int = LARGE_BYTES) -> RawRequest | None:
    """`unpack` without copying raw contents; None if ``body`` has an unexpected layout."""
    spans = raw_spans(body)
    if len(body) - sum(span.end - span.begin for span in spans or ()) > loop_limit_bytes:
        raise TooLargeForLoop
    if spans is None:
        return None
    view = memoryview(body)
    return RawRequest(without_raw(body, spans), [view[span.begin : span.end] for span in spans], body)


def without_raw(body: Buffer, spans: Sequence[Span]) -> ModelInferRequest:
    """Return the message in ``body`` without its raw contents in ``spans``."""
    view, rest, end = memoryview(body), [], 0
    for span in spans:
        rest.append(view[end : span.field])
        end = span.end
    rest.append(view[end:])
    return ModelInferRequest.FromString(b"".join(rest))


def raw_spans(body: Buffer) -> list[Span] | None:
    """Return the places of the raw contents of a ``ModelInferRequest``; None if it has an unexpected layout."""
    spans = []
    position = 0
    try:
        for _ in range(SPLIT_FIELDS):
            if position >= len(body):
                break
            begin = position
            tag, position = read_varint(body, position)
            kind = tag & 7
            if kind == LENGTH_DELIMITED:
                size, position = read_varint(body, position)
                if tag == _RAW_INPUT_TAG:
                    spans.append(Span(begin, position, position + size))
                position += size
            elif kind == 0:
                position = read_varint(body, position)[1]
            else:
                position += FIXED_SIZES[kind]
    except (IndexError, KeyError):  # truncated, or a group: protobuf reports the error
        return None
    return spans if position == len(body) else None


def read_varint(body: Buffer, position: int) -> tuple[int, int]:
    """Return the varint at ``position`` and the position after it. Raises IndexError if it does not end."""
    value = shift = 0
    while True:
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError(position)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
