"""The messages of a call: assembled from the pieces of its body, decompressed and compressed (gzip and deflate).

Source: docs/spec/behaviours.md section 2.6.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection
from math import inf
from struct import Struct

from headrace.config.option_parts import CompressionLevel
from headrace.off_loop import UNBOUNDED
from headrace_grpc.http2.limits import MIN_MESSAGE_RATE
from headrace_grpc.status import INTERNAL, RESOURCE_EXHAUSTED, Status
from headrace_grpc.wire import MESSAGE_BYTES, Buffer
from headrace_hosts import inflating
from headrace_hosts.inflating import CorruptData, Take, TooLarge, new_memory

#: The prefix of a message: whether it is compressed, and its size.
PREFIX = Struct(">BL")
PREFIX_BYTES = PREFIX.size
_ALIGNMENT = 64
#: A small message gets all its memory at once. A larger one gets 1 MiB first, 16 MiB when that is full, and then four
#: times as much whenever that is full. Pages are allocated when they are written, but from 4 MiB on NumPy asks for
#: pages of 2 MiB, and one byte takes a whole page.
_HUGE_BYTES = 4 * 1024 * 1024
_FIRST_BYTES, _SECOND_BYTES = 1024 * 1024, 16 * 1024 * 1024
#: At most 64 messages are assembled before they are taken. The bytes after them stay in one piece: tiny messages would
#: need sixteen times their size.
_AHEAD = 64

IDENTITY, GZIP, DEFLATE = b"identity", b"gzip", b"deflate"
ACCEPTED = b"identity, deflate, gzip"

#: A compressed message may have 32 times its size when decompressed, without limit. Real tensors compress less. What
#: compresses more is limited by ``--grpc-max-decompressed-size``.
RATIO = 32

#: zlib's window bits.
DECODERS = {GZIP: zlib.MAX_WBITS | 16, DEFLATE: zlib.MAX_WBITS}

#: As grpc's core: gzip for low, else deflate; the other one if the client does not accept it.
_PREFERENCES: dict[CompressionLevel, tuple[bytes, bytes]] = {
    "low": (GZIP, DEFLATE),
    "medium": (DEFLATE, GZIP),
    "high": (DEFLATE, GZIP),
}
_ZLIB_LEVELS: dict[CompressionLevel, int] = {"low": 1, "medium": 6, "high": 9}


class MessageAssembler:
    """The messages that have arrived and are not taken, and the one that is arriving."""

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
        "_take",
        "complete",
        "complete_bytes",
    )

    def __init__(self, take: Take = new_memory) -> None:
        """``take`` returns memory for messages that arrive in pieces."""
        self._take = take
        #: Whether each is compressed, and its bytes, which do not change any more.
        self.complete: deque[tuple[int, Buffer]] = deque()
        #: Of these with their prefixes, and of the bytes after them.
        self.complete_bytes = 0
        self._later = bytearray()
        self._prefix = b""
        self._memory: memoryview | None = None
        self._flag = self._size = self._filled = 0
        # For `stalled_seconds`
        self._arrived = 0
        self._looked_at = 0.0
        self._stalled_since = inf

    @property
    def is_coming(self) -> bool:
        """True if a message is arriving and its prefix is complete; there is a `tail` then."""
        return self._memory is not None

    @property
    def size_bytes(self) -> int:
        """The size of the message that is arriving, or has arrived last."""
        return self._size

    @property
    def missing_bytes(self) -> int:
        """The missing bytes of the message that is arriving."""
        return self._size - self._filled if self._memory is not None else 0

    @property
    def kept_bytes(self) -> int:
        """Received bytes that are not taken."""
        return self.complete_bytes + (self._filled if self._memory is not None else 0)

    @property
    def is_between(self) -> bool:
        """True if no message is arriving."""
        return self._memory is None and not self._prefix

    def stalled_seconds(self, now: float) -> float:
        """Return for how long less than `MIN_MESSAGE_RATE` has arrived between calls of this."""
        if self._arrived >= MIN_MESSAGE_RATE * (now - self._looked_at):
            self._stalled_since = inf
        self._arrived, self._looked_at = 0, now
        self._stalled_since = min(self._stalled_since, now)
        return now - self._stalled_since

    def goes_on(self) -> None:
        """Reset the stall time: the client owes nothing at the moment."""
        self._stalled_since = inf

    def append(self, data: Buffer) -> None:
        """Add received bytes. Raises `Status` for an invalid message, and for one that is too large."""
        at = 0 if self._later else self._read(data)
        if at < len(data):
            self._later += data[at:]
            self.complete_bytes += len(data) - at

    def take(self) -> tuple[int, Buffer]:
        """Return the first of `complete`. Raises `Status` as `append` does."""
        found = self.complete.popleft()
        self.complete_bytes -= PREFIX_BYTES + len(found[1])
        if self._later and not self.complete:
            with memoryview(self._later) as data:
                at = self._read(data)
            del self._later[:at]
            self.complete_bytes -= at
        return found

    def _read(self, data: Buffer) -> int:
        """Assemble messages until there are enough, or no data is left. Return the position."""
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
        """Return the memory for the next bytes of the arriving message, at most ``size_bytes``."""
        memory = self._memory
        assert memory is not None
        if self._filled == len(memory):
            memory = self._grow(memory)
        return memory[self._filled : min(self._filled + size_bytes, self._size)]

    def advance(self, size_bytes: int) -> None:
        """Record ``size_bytes`` written to `tail`."""
        self._filled += size_bytes
        self._arrived += size_bytes
        if self._filled == self._size:
            assert self._memory is not None
            self.complete.append((self._flag, self._memory))
            self.complete_bytes += PREFIX_BYTES + self._size
            self._memory = None

    def _begin(self, data: Buffer, at: int) -> int:
        """Read a prefix. Return the position after it, or after its message if that is complete."""
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
        self._memory = _aligned(size if size < _HUGE_BYTES else _FIRST_BYTES, size, self._take)
        return begin

    def _grow(self, memory: memoryview) -> memoryview:
        larger = _aligned(min(self._size, max(_SECOND_BYTES, 4 * len(memory))), self._size, self._take)
        larger[: len(memory)] = memory
        self._memory = larger
        return larger


def _aligned(size_bytes: int, message_bytes: int, take: Take) -> memoryview:
    """Return memory of ``take`` for a message that ends at an aligned address.

    Tensors are last in a message, so a tensor of a round size starts aligned, too.
    """
    try:
        memory = take(size_bytes + _ALIGNMENT)
    except MemoryError:
        raise Status(RESOURCE_EXHAUSTED, f"no memory for a message of {message_bytes} bytes") from None
    offset = -(memory.ctypes.data + message_bytes) % _ALIGNMENT
    return memory.data[offset : offset + size_bytes]


# ---------------------------------------------------------------------- compressed messages, in bounded steps


def inflate(
    data: bytes | memoryview, encoding: bytes, limit: int, loop_limit_bytes: int = UNBOUNDED, take: Take = new_memory
) -> memoryview:
    """Return ``data`` decompressed, in memory of ``take``. Blocks: about 3 ms per MiB.

    Raises `Status` beyond ``limit`` or if ``data`` is malformed, and `TooLargeForLoop` beyond ``loop_limit_bytes``.
    """
    try:
        return inflating.inflate(memoryview(data), DECODERS[encoding], limit, loop_limit_bytes, take)
    except TooLarge as error:
        text = f"Received message larger than max ({error.size_bytes} vs. {limit})"
        raise Status(RESOURCE_EXHAUSTED, text) from None
    except CorruptData as error:
        if error.is_truncated:
            raise Status(INTERNAL, "Decompression failed: the message is truncated") from None
        raise Status(INTERNAL, "Decompression failed due to zlib error") from None


def bound(received_bytes: int, limit: int) -> int:
    """Return the maximum decompressed size of a message of ``received_bytes``; every message may have ``limit``."""
    return min(MESSAGE_BYTES, max(limit, RATIO * received_bytes))


class Compressor:
    """Compresses as ``--grpc-infer-response-compression-level`` says."""

    def __init__(self, level: CompressionLevel) -> None:
        self._preferences = _PREFERENCES.get(level, ())
        self._level = _ZLIB_LEVELS.get(level, 0)

    def choose(self, accepts: Collection[bytes]) -> bytes:
        """Return the encoding for a client that accepts ``accepts``; empty for none."""
        return next((name for name in self._preferences if name in accepts), b"")

    def deflate(self, data: bytes, encoding: bytes) -> bytes:
        """Return ``data`` compressed. Blocks: up to 50 ms per MiB."""
        packer = zlib.compressobj(self._level, wbits=DECODERS[encoding])
        return packer.compress(data) + packer.flush()
