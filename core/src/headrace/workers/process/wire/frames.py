"""Frames: how messages are told apart on a socket, and what kinds there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from headrace.workers.process.wire.failure import WireError

#: Of the whole schema.
VERSION: Final = 1
#: A frame may not be larger than this; a tensor over it needs room in the arena.
MOST_BYTES: Final = (1 << 32) - 8

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_HEADER = Struct("<IBxHI")
_INTEGER = Struct("<Q")
HEADER_BYTES: Final = _HEADER.size
#: So many zeros, by their number.
PADDING: Final = [bytes(count) for count in range(8)]


class Kind(IntEnum):
    """What a frame says. To the child: LOAD, RUN, STOP, CHECK, RESULT, REPLIES. From it: LOADED,
    FAILED, DONE, ANSWERS, CHECKED, INFER, CALL, NOTE, UPDATE. Both ways: CANCEL, ENOUGH, READ, RELEASE."""

    LOAD = 1  # JSON: an order
    LOADED = 2  # JSON: what the parent needs to know of the instance
    FAILED = 3  # JSON: code, message
    RUN = 4  # requests: one batch
    DONE = 5  # times, answers: the batch has run; statuses may be LATER
    ANSWERS = 6  # answers that `RUN` did not give, final or not
    STOP = 7  # close the instance and exit
    CANCEL = 8  # integers: requests whose callers have gone
    READ = 9  # integers: requests of which one response each has been read
    RELEASE = 10  # integers: offsets in the arena of the receiver that are free again
    CHECK = 11  # ask the instance whether it is ready
    CHECKED = 12  # JSON: ready, reason
    INFER = 13  # requests to other models
    REPLIES = 14  # answers to `INFER`
    CALL = 15  # JSON: id, method, arguments
    RESULT = 16  # JSON: id, and value or code and message
    NOTE = 17  # JSON: method, arguments; wants no answer
    UPDATE = 18  # handle, operation, value: of a metric
    ENOUGH = 19  # integers: requests whose callers want no more, but take what is answered


_KINDS: Final = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """One message. ``body`` is the whole frame; ``data`` is where its tensors begin."""

    kind: Kind
    number: int
    body: Buffer
    data: int

    @property
    def text(self) -> bytes:
        """The meta of a frame that is one text."""
        return bytes(self.body[HEADER_BYTES : self.data]).rstrip(b"\0")


def frame(kind: Kind, count: int, meta: bytes = b"") -> bytes:
    """A message without tensors."""
    end = HEADER_BYTES + len(meta)
    total = -(-end // 8) * 8
    return _HEADER.pack(total, kind, count, total) + meta + bytes(total - end)


def data_frame(kind: Kind, count: int, meta: Sequence[bytes], data: Sequence[Buffer], size: int) -> bytes:
    """A message with ``size`` bytes of ``data``. Raises `ValueError` if it is too large."""
    head = b"".join(meta)
    end = HEADER_BYTES + len(head)
    begin = -(-end // 8) * 8
    total = begin + size
    if total > MOST_BYTES:
        raise ValueError(f"a message of {total} bytes, the limit is {MOST_BYTES}")
    return b"".join((_HEADER.pack(total, kind, count, begin), head, PADDING[begin - end], *data))


def integers_frame(kind: Kind, values: Sequence[int]) -> bytes:
    """A message of integers u64."""
    return frame(kind, len(values), b"".join(map(_INTEGER.pack, values)))


def read_integers(message: Frame) -> list[int]:
    """The values of an `integers_frame`. Raises `WireError`."""
    if HEADER_BYTES + 8 * message.number > len(message.body):
        raise WireError(f"{message.kind.name}: {message.number} integers do not fit")
    return [_INTEGER.unpack_from(message.body, HEADER_BYTES + 8 * index)[0] for index in range(message.number)]


class Frames:
    """Cuts what a socket has received into frames. ``writable`` ones own a buffer of their own."""

    def __init__(self, writable: bool = False) -> None:
        self._rest = bytearray()
        self._wanted = HEADER_BYTES
        self._writable = writable

    def feed(self, data: bytes | bytearray) -> Iterator[Frame]:
        """The frames that ``data`` completes. Raises `WireError`."""
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
            if total < HEADER_BYTES or total % 8 or not HEADER_BYTES <= begin <= total:
                raise WireError(f"a frame of {total} bytes whose data begins at {begin}")
            if kind not in _KINDS:
                raise WireError(f"a frame of kind {kind}")
            if end - position < total:
                self._wanted = total
                break
            yield Frame(_KINDS[kind], count, self._cut(source, position, total), begin)
            position += total
        if position < end:
            self._rest = bytearray(memoryview(source)[position:])

    def _cut(self, source: bytes | bytearray, position: int, total: int) -> Buffer:
        whole = total == len(source)
        if self._writable:
            return source if whole and isinstance(source, bytearray) else bytearray(source[position : position + total])
        return source if whole else source[position : position + total]
