"""The messages of a call: put together from what comes of its body, unpacked and packed (gzip and deflate).

Source: docs/spec/behaviours.md section 2.6.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection
from math import inf
from struct import Struct

import numpy as np

from headrace.config.options import CompressionLevel
from headrace.frontends import inflating
from headrace.frontends.inflating import CorruptData, TooLarge
from headrace.off_loop import UNBOUNDED
from headrace_grpc.http2.limits import MIN_MESSAGE_RATE
from headrace_grpc.status import INTERNAL, RESOURCE_EXHAUSTED, Status
from headrace_grpc.wire import MESSAGE_BYTES, Buffer

#: What stands before a message: whether it is compressed, and its size.
PREFIX = Struct(">BL")
PREFIX_BYTES = PREFIX.size
_ALIGNMENT = 64
#: A message has all its memory at first if that is little; else so much, and when that is full, as much as the next
#: constant says, and four times as much whenever that is full. The system gives the pages as they are written, but
#: NumPy asks for pages of 2 MiB from 4 MiB on, of which one byte takes a whole one.
_HUGE_BYTES = 4 * 1024 * 1024
_FIRST_BYTES, _SECOND_BYTES = 1024 * 1024, 16 * 1024 * 1024
#: So many are put together before they are taken. What comes behind them stays in one piece: tiny messages would take
#: sixteen times their bytes.
_AHEAD = 64

IDENTITY, GZIP, DEFLATE = b"identity", b"gzip", b"deflate"
ACCEPTED = b"identity, deflate, gzip"

#: A compressed message may be unpacked to so many times its size, however large that is. Tensors that say
#: something pack by less; what packs by more is bounded by ``--grpc-max-decompressed-size``.
RATIO = 32

#: zlib's window bits.
DECODERS = {GZIP: zlib.MAX_WBITS | 16, DEFLATE: zlib.MAX_WBITS}

#: grpc's core picks gzip for low, else deflate, and the other if the client does not take it.
_PREFERENCES: dict[CompressionLevel, tuple[bytes, bytes]] = {
    "low": (GZIP, DEFLATE),
    "medium": (DEFLATE, GZIP),
    "high": (DEFLATE, GZIP),
}
_ZLIB_LEVELS: dict[CompressionLevel, int] = {"low": 1, "medium": 6, "high": 9}


class MessageAssembler:
    """The messages that have come and were not taken, and the one that is coming."""

    __slots__ = (
        "_arrived",
        "_filled",
        "_flag",
        "_later",
        "_looked_at",
        "_memory",
        "_prefix",
        "_size",
        "_stalled_since",
        "complete",
        "complete_bytes",
    )

    def __init__(self) -> None:
        #: Whether it is compressed, and its bytes. Nobody else writes to these any more.
        self.complete: deque[tuple[int, Buffer]] = deque()
        #: Of these, their prefixes included, and of what came behind them.
        self.complete_bytes = 0
        self._later = bytearray()
        self._prefix = b""
        self._memory: memoryview | None = None
        self._flag = self._size = self._filled = 0
        # What `stalled_seconds` looks at
        self._arrived = 0
        self._looked_at = 0.0
        self._stalled_since = inf

    @property
    def is_coming(self) -> bool:
        """Whether a message has begun to come, as far as its prefix at least; then there is a `tail`."""
        return self._memory is not None

    @property
    def missing_bytes(self) -> int:
        """Of the message that is coming."""
        return self._size - self._filled if self._memory is not None else 0

    @property
    def kept_bytes(self) -> int:
        """What has arrived and was not taken."""
        return self.complete_bytes + (self._filled if self._memory is not None else 0)

    @property
    def is_between(self) -> bool:
        """Whether no message has begun to come."""
        return self._memory is None and not self._prefix

    def stalled_seconds(self, now: float) -> float:
        """For how long less than `MIN_MESSAGE_RATE` has come, from one call of this to the next."""
        if self._arrived >= MIN_MESSAGE_RATE * (now - self._looked_at):
            self._stalled_since = inf
        self._arrived, self._looked_at = 0, now
        self._stalled_since = min(self._stalled_since, now)
        return now - self._stalled_since

    def goes_on(self) -> None:
        """Nothing is owed at the moment."""
        self._stalled_since = inf

    def append(self, data: Buffer) -> None:
        """Take in ``data``. Raises `Status` for what is no message, and for one that is too large."""
        at = 0 if self._later else self._read(data)
        if at < len(data):
            self._later += data[at:]
            self.complete_bytes += len(data) - at

    def take(self) -> tuple[int, Buffer]:
        """The first of `complete`. Raises `Status` as `append` does."""
        found = self.complete.popleft()
        self.complete_bytes -= PREFIX_BYTES + len(found[1])
        if self._later and not self.complete:
            with memoryview(self._later) as data:
                at = self._read(data)
            del self._later[:at]
            self.complete_bytes -= at
        return found

    def _read(self, data: Buffer) -> int:
        """Put messages together until there are enough, or nothing is left; how far that came."""
        at, end = 0, len(data)
        while at < end:
            if self._memory is None:
                if len(self.complete) >= _AHEAD:
                    break
                begin, at = at, self._begin(data, at)
                self._arrived += at - begin
                continue
            taken = min(end - at, self._size - self._filled)
            tail = self.tail(taken)
            taken = len(tail)
            tail[:] = data[at : at + taken]
            at += taken
            self.advance(taken)
        return at

    def tail(self, size_bytes: int) -> memoryview:
        """Where the next bytes of the message that is coming belong, at most ``size_bytes``."""
        memory = self._memory
        assert memory is not None
        if self._filled == len(memory):
            memory = self._grow(memory)
        return memory[self._filled : min(self._filled + size_bytes, self._size)]

    def advance(self, size_bytes: int) -> None:
        """``size_bytes`` were written to `tail`."""
        self._filled += size_bytes
        self._arrived += size_bytes
        if self._filled == self._size:
            assert self._memory is not None
            self.complete.append((self._flag, self._memory))
            self.complete_bytes += PREFIX_BYTES + self._size
            self._memory = None

    def _begin(self, data: Buffer, at: int) -> int:
        """Read a prefix; the position behind it, or behind its message if all of it is there."""
        begin = at + PREFIX_BYTES - len(self._prefix)
        prefix = self._prefix + bytes(data[at:begin])
        if len(prefix) < PREFIX_BYTES:
            self._prefix = prefix
            return len(data)
        self._prefix = b""
        size: int
        flag, size = PREFIX.unpack(prefix)
        if flag > 1:
            raise Status(INTERNAL, f"Invalid message flags: {flag}")
        if size > MESSAGE_BYTES:
            raise Status(RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {MESSAGE_BYTES})")
        if begin + size <= len(data):
            self.complete.append((flag, bytes(data[begin : begin + size])))
            self.complete_bytes += PREFIX_BYTES + size
            return begin + size
        self._flag, self._size, self._filled = flag, size, 0
        self._memory = _aligned(size if size < _HUGE_BYTES else _FIRST_BYTES, size)
        return begin

    def _grow(self, memory: memoryview) -> memoryview:
        larger = _aligned(min(self._size, max(_SECOND_BYTES, 4 * len(memory))), self._size)
        larger[: len(memory)] = memory
        self._memory = larger
        return larger


def _aligned(size_bytes: int, message_bytes: int) -> memoryview:
    """Memory for a message that ends where engines like their tensors to start.

    Tensors come last in a message, so that a tensor of a round size begins there, too.
    """
    try:
        memory = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    except MemoryError:
        raise Status(RESOURCE_EXHAUSTED, f"no memory for a message of {message_bytes} bytes") from None
    offset = -(memory.ctypes.data + message_bytes) % _ALIGNMENT
    return memory[offset : offset + size_bytes].data


# ---------------------------------------------------------------------- compressed messages, in bounded steps


def inflate(data: bytes | memoryview, encoding: bytes, limit: int, patience: int = UNBOUNDED) -> memoryview:
    """``data`` unpacked. Blocks: about 3 ms per MiB.

    Raises `Status` beyond ``limit``, or if ``data`` is malformed, and `TooLargeForLoop` beyond ``patience``.
    """
    try:
        return inflating.inflate(memoryview(data), DECODERS[encoding], limit, patience)
    except TooLarge as error:
        text = f"Received message larger than max ({error.size_bytes} vs. {limit})"
        raise Status(RESOURCE_EXHAUSTED, text) from None
    except CorruptData as error:
        if error.is_truncated:
            raise Status(INTERNAL, "Decompression failed: the message is truncated") from None
        raise Status(INTERNAL, "Decompression failed due to zlib error") from None


def bound(received_bytes: int, limit: int) -> int:
    """What a message of ``received_bytes`` may unpack to, where any may to ``limit``."""
    return min(MESSAGE_BYTES, max(limit, RATIO * received_bytes))


class Compressor:
    """What ``--grpc-infer-response-compression-level`` asks for."""

    def __init__(self, level: CompressionLevel) -> None:
        self._preferences = _PREFERENCES.get(level, ())
        self._level = _ZLIB_LEVELS.get(level, 0)

    def choose(self, accepts: Collection[bytes]) -> bytes:
        """The encoding for a client that takes ``accepts``; empty for none."""
        return next((name for name in self._preferences if name in accepts), b"")

    def deflate(self, data: bytes, encoding: bytes) -> bytes:
        """``data`` packed. Blocks: up to 50 ms per MiB."""
        packer = zlib.compressobj(self._level, wbits=DECODERS[encoding])
        return packer.compress(data) + packer.flush()
