"""Frames: how messages are told apart on a socket, and what kinds there are.

A message is a frame::

    header   total u32 (a multiple of 8, header included) | kind u8 | spare u8 | number u16 | data u32
    meta     what the kind says, `number` times
    data     tensors that travel inside, each at a multiple of 8 bytes; begins at `data`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

#: Of the whole schema.
VERSION: Final = 7
#: A frame may not be larger than this; a tensor over it needs room in the arena.
MOST_BYTES: Final = (1 << 32) - 8
#: Integers that one frame can count.
MOST_INTEGERS: Final = 65535
#: Kinds from here on are what the two sides have agreed on beside `Kind`; none reaches `_END_OF_KINDS`.
FIRST_OWN_KIND: Final = 32
_END_OF_KINDS: Final = 64

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_HEADER = Struct("<IBxHI")
_INTEGER = Struct("<Q")
HEADER_BYTES: Final = _HEADER.size
#: So many zeros, by their number.
PADDING: Final = [bytes(count) for count in range(8)]


class ProtocolError(Exception):
    """The peer has sent something that no version of the schema allows."""


class Kind(IntEnum):
    """What a frame says, either way. A side that has sent REQUESTS hears ANSWERS or DONE, and tells
    CANCEL, STOP and READ of them."""

    REQUESTS = 1  # requests
    ANSWERS = 2  # answers, final or not
    DONE = 3  # times, answers: a batch has run; statuses may be LATER, whose answers will be ANSWERS
    CANCEL = 4  # integers: requests whose callers have gone
    STOP = 5  # integers: requests whose callers want no more, but take what is answered
    READ = 6  # integers: requests of which one response each has been read
    RELEASE = 7  # integers: offsets in the arena of the receiver that are free again
    CALL = 8  # JSON: id, method, arguments
    RESULT = 9  # JSON: id, and value or code and message
    NOTE = 10  # JSON: method, arguments; wants no answer
    LAYOUT = 11  # JSON: what requests or answers to come have in common (`headrace.ipc.layouts`)
    ALIKE_REQUESTS = 12  # requests of one layout
    ALIKE_DONE = 13  # times, last answers of one layout: a batch has run that came as ALIKE_REQUESTS or REQUESTS


class Frame(NamedTuple):
    """One message. ``body`` is the whole frame; ``data`` is where its tensors begin."""

    kind: int
    number: int
    body: Buffer
    data: int

    @property
    def text(self) -> bytes:
        """The meta of a frame that is one text."""
        return bytes(self.body[HEADER_BYTES : self.data]).rstrip(b"\0")


def head(kind: int, count: int, begin: int, total: int) -> bytes:
    """What a message of ``total`` bytes begins with whose data begin at ``begin``."""
    return _HEADER.pack(total, kind, count, begin)


def frame(kind: int, count: int, meta: bytes = b"") -> bytes:
    """A message without tensors."""
    end = HEADER_BYTES + len(meta)
    total = -(-end // 8) * 8
    return _HEADER.pack(total, kind, count, total) + meta + bytes(total - end)


def data_frame(kind: int, count: int, meta: Sequence[bytes], data: Sequence[Buffer], size: int) -> bytes:
    """A message with ``size`` bytes of ``data``. Raises `ValueError` if it is too large."""
    head = b"".join(meta)
    end = HEADER_BYTES + len(head)
    begin = -(-end // 8) * 8
    total = begin + size
    if total > MOST_BYTES:
        raise ValueError(f"a message of {total} bytes, the limit is {MOST_BYTES}")
    return b"".join((_HEADER.pack(total, kind, count, begin), head, PADDING[begin - end], *data))


def integers_frame(kind: int, values: Sequence[int]) -> bytes:
    """A message of at most `MOST_INTEGERS` integers u64."""
    return frame(kind, len(values), b"".join(map(_INTEGER.pack, values)))


def read_integers(message: Frame) -> list[int]:
    """The values of an `integers_frame`. Raises `ProtocolError`."""
    if HEADER_BYTES + 8 * message.number > len(message.body):
        raise ProtocolError(f"kind {message.kind}: {message.number} integers do not fit")
    return [_INTEGER.unpack_from(message.body, HEADER_BYTES + 8 * index)[0] for index in range(message.number)]


def _is_sound(total: int, kind: int, begin: int) -> bool:
    return HEADER_BYTES <= begin <= total and not total % 8 and 0 < kind < _END_OF_KINDS


class FrameParser:
    """Cuts what a socket has received into frames. ``writable`` ones own a buffer of their own."""

    def __init__(self, writable: bool = False) -> None:
        self._rest = bytearray()
        self._wanted = HEADER_BYTES
        self._writable = writable

    def feed(self, data: bytes | bytearray) -> Iterable[Frame]:
        """The frames that ``data`` completes. Raises `ProtocolError`, in the course of it."""
        if not self._rest and len(data) >= HEADER_BYTES and (not self._writable or isinstance(data, bytearray)):
            total, kind, count, begin = _HEADER.unpack_from(data)
            if total == len(data) and _is_sound(total, kind, begin):  # nearly always
                return (Frame(kind, count, data, begin),)
        return self._cut_up(data)

    def _cut_up(self, data: bytes | bytearray) -> Iterator[Frame]:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            source: bytes | bytearray = self._rest
            self._rest = bytearray()
        else:
            source = data
        position, end = 0, len(source)
        while position < end:
            if end - position < HEADER_BYTES:
                self._wanted = HEADER_BYTES
                break
            total, kind, count, begin = _HEADER.unpack_from(source, position)
            if not _is_sound(total, kind, begin):
                raise ProtocolError(f"a frame of kind {kind} and {total} bytes whose data begins at {begin}")
            if end - position < total:
                self._wanted = total
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
