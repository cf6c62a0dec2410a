"""Frames: how messages are delimited on a socket, and the kinds of messages.

A message is a frame::

    header   total u32 (a multiple of 8, header included) | kind u8 | spare u8 | number u16 | data u32
    meta     as the kind defines it; `number` is how many requests, answers or integers it holds
    data     the tensors in the frame, each at a multiple of 8 bytes; begins at `data`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

#: The version of the schema: of all messages of this package.
VERSION: Final = 10
#: The largest frame. A larger tensor needs room in the arena.
MAX_BYTES: Final = (1 << 32) - 8
#: The most integers in one frame.
MAX_INTEGERS: Final = 65535
#: Users of this package define their own kinds from here up to `_END_OF_KINDS`, exclusive.
FIRST_OWN_KIND: Final = 32
_END_OF_KINDS: Final = 64

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_HEADER = Struct("<IBxHI")
_INTEGER = Struct("<Q")
HEADER_BYTES: Final = _HEADER.size
#: PADDING[n] is n zero bytes.
PADDING: Final = [bytes(count) for count in range(8)]


class ProtocolError(Exception):
    """The peer has sent something that the schema does not allow."""


class Kind(IntEnum):
    """The kind of a frame, in either direction. A side that has sent REQUESTS receives ANSWERS or DONE, and sends
    CANCEL, STOP and READ about its requests."""

    REQUESTS = 1  # requests
    ANSWERS = 2  # answers, final or not
    DONE = 3  # times, answers: a batch has run; answers with status LATER follow in ANSWERS
    CANCEL = 4  # integers: requests whose callers have disconnected
    STOP = 5  # integers: requests whose callers want no new responses, but accept those under way
    READ = 6  # integers: requests whose callers have read one more response
    RELEASE = 7  # integers: offsets in the receiver's arena that are free again
    CALL = 8  # JSON: id, method, arguments
    RESULT = 9  # JSON: id, and value or code and message
    NOTE = 10  # JSON: method, arguments; has no result
    LAYOUT = 11  # JSON: the common parts of later requests or answers (`headrace_processes.ipc.layouts`)
    ALIKE_REQUESTS = 12  # requests of one layout
    ALIKE_DONE = 13  # times, final answers of one layout: a batch has run that was sent as ALIKE_REQUESTS or REQUESTS
    UNMAP = 14  # integers: mappings of client memory that the receiver releases (`headrace_processes.ipc.mappings`)
    LOST = 15  # integers: mappings that the sender has lost; precedes the answers
    DEVICE_FREE = 16  # integers: blocks in the receiver's device memory that are free again
    DEVICE_RETIRE = 17  # integers: segments of the sender's device memory that the receiver closes
    DEVICE_CLOSED = 18  # integers: segments of the receiver's device memory that the sender has closed


class Frame(NamedTuple):
    """One message. ``body`` is the whole frame; ``data`` is where its tensors begin."""

    kind: int
    number: int
    body: Buffer
    data: int

    @property
    def text(self) -> bytes:
        """The meta as one text, without its padding."""
        return bytes(self.body[HEADER_BYTES : self.data]).rstrip(b"\0")


def head(kind: int, count: int, begin: int, total: int) -> bytes:
    """Return the header of a message of ``total`` bytes whose data begin at ``begin``."""
    return _HEADER.pack(total, kind, count, begin)


def frame(kind: int, count: int, meta: bytes = b"") -> bytes:
    """Return a message without tensors."""
    end = HEADER_BYTES + len(meta)
    total = -(-end // 8) * 8
    return _HEADER.pack(total, kind, count, total) + meta + bytes(total - end)


def data_frame(kind: int, count: int, meta: Sequence[bytes], data: Sequence[Buffer], size: int) -> bytes:
    """Return a message with ``size`` bytes of ``data``. Raises `ValueError` if it exceeds `MAX_BYTES`."""
    head = b"".join(meta)
    end = HEADER_BYTES + len(head)
    begin = -(-end // 8) * 8
    total = begin + size
    if total > MAX_BYTES:
        raise ValueError(f"a message of {total} bytes, the limit is {MAX_BYTES}")
    return b"".join((_HEADER.pack(total, kind, count, begin), head, PADDING[begin - end], *data))


def integers_frame(kind: int, values: Sequence[int]) -> bytes:
    """Return a message of at most `MAX_INTEGERS` integers, u64 each."""
    return frame(kind, len(values), b"".join(map(_INTEGER.pack, values)))


def read_integers(message: Frame) -> list[int]:
    """Return the values of an `integers_frame`. Raises `ProtocolError`."""
    if HEADER_BYTES + 8 * message.number > len(message.body):
        raise ProtocolError(f"kind {message.kind}: {message.number} integers do not fit")
    return [_INTEGER.unpack_from(message.body, HEADER_BYTES + 8 * index)[0] for index in range(message.number)]


def _is_valid(total: int, kind: int, begin: int) -> bool:
    return HEADER_BYTES <= begin <= total and not total % 8 and 0 < kind < _END_OF_KINDS


class FrameParser:
    """Splits the bytes received from a socket into frames. If ``writable``, each frame has its own writable buffer."""

    def __init__(self, writable: bool = False) -> None:
        self._rest = bytearray()
        self._needed = HEADER_BYTES
        self._writable = writable

    def feed(self, data: bytes | bytearray) -> Iterable[Frame]:
        """Return the frames that ``data`` completes. Raises `ProtocolError`, here or during the iteration."""
        if not self._rest and len(data) >= HEADER_BYTES and (not self._writable or isinstance(data, bytearray)):
            total, kind, count, begin = _HEADER.unpack_from(data)
            if total == len(data) and _is_valid(total, kind, begin):  # the usual case
                return (Frame(kind, count, data, begin),)
        return self._split(data)

    def _split(self, data: bytes | bytearray) -> Iterator[Frame]:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            source: bytes | bytearray = self._rest
            self._rest = bytearray()
        else:
            source = data
        position, end = 0, len(source)
        while position < end:
            if end - position < HEADER_BYTES:
                self._needed = HEADER_BYTES
                break
            total, kind, count, begin = _HEADER.unpack_from(source, position)
            if not _is_valid(total, kind, begin):
                raise ProtocolError(f"a frame of kind {kind} and {total} bytes whose data begins at {begin}")
            if end - position < total:
                self._needed = total
                break
            yield Frame(kind, count, self._cut(source, position, total), begin)
            position += total
        if position < end:
            self._rest = bytearray(memoryview(source)[position:])

    def _cut(self, source: bytes | bytearray, position: int, total: int) -> Buffer:
        whole = total == len(source)
        if self._writable:
            return source if whole and isinstance(source, bytearray) else bytearray(source[position : position + total])
        return source if whole else source[position : position + total]
