"""The body of a request, as it arrives: into memory of its own, in chunks (RFC 9112, 7.1), or compressed."""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import InvalidArgument
from headrace_hosts.inflating import CorruptData, Take, TooLarge, inflate, new_memory
from headrace_http.caller_limits import HttpLimits, inflated_too_large
from headrace_http.request_head import Malformed, read_fields

#: The alignment of tensors: a cache line, and the width of AVX-512.
ALIGNMENT = 64
#: From this size on, a body of known length is received directly into its own memory.
DIRECT_BYTES = 64 * 1024
#: From 4 MiB on, NumPy allocates pages of 2 MiB, and one byte takes a whole page. So such a body first gets 1 MiB,
#: until the caller has filled that.
_HUGE_BYTES = 4 * 1024 * 1024
_FIRST_BYTES = 1024 * 1024
_PAGE_BYTES = 2 * 1024 * 1024
#: The ``Content-Encoding`` values of requests that can be decoded.
DECODABLE = (b"", b"identity", b"gzip", b"deflate")
#: ``wbits`` of zlib with which it detects the format by the first bytes.
_DETECT = 32 + 15
_HEX = b"0123456789abcdefABCDEF"
#: The maximum digits of a chunk size without leading zeros, and the bytes of its line that are not counted as spare.
_SIZE_DIGITS, _LINE_BYTES = 15, 20
#: At most this many chunks are taken in one turn of the event loop: a fraction of a millisecond.
_PER_TURN = 32


def aligned(size_bytes: int, json_bytes: int, take: Take = new_memory) -> memoryview:
    """Return memory of ``take`` for a body whose tensors start after ``json_bytes``, at an aligned address.

    The operating system allocates pages when they are written, so an announced size costs nothing. A body from 4 MiB on
    begins with a page of 2 MiB.
    """
    page_bytes = 0 if size_bytes < _HUGE_BYTES else _PAGE_BYTES
    memory = take(size_bytes + page_bytes + ALIGNMENT)
    begin = memory.ctypes.data
    offset = -begin % page_bytes if page_bytes else 0
    offset += -(begin + offset + json_bytes) % ALIGNMENT
    return memory.data[offset : offset + size_bytes]


class DirectBody:
    """A body of known length in one piece of memory, which the socket fills.

    A large body first gets little memory, until the caller has filled that: announcing a size costs nothing.
    """

    __slots__ = ("_json_bytes", "_size_bytes", "_take", "memory", "received_bytes")

    def __init__(self, size_bytes: int, json_bytes: int, take: Take = new_memory) -> None:
        self._size_bytes, self._json_bytes, self._take = size_bytes, json_bytes, take
        self.memory = aligned(size_bytes if size_bytes < _HUGE_BYTES else _FIRST_BYTES, json_bytes, take)
        self.received_bytes = 0

    def append(self, data: bytes | bytearray) -> None:
        """Copy the bytes that came with the head, which are fewer than `_FIRST_BYTES`."""
        end = self.received_bytes + len(data)
        self.memory[self.received_bytes : end] = data
        self.received_bytes = end

    @property
    def held_bytes(self) -> int:
        """The memory that the received bytes take."""
        received = self.received_bytes
        return (
            received if received <= _FIRST_BYTES else min(self._size_bytes, -(-received // _PAGE_BYTES) * _PAGE_BYTES)
        )

    @property
    def is_full(self) -> bool:
        """True if the next byte takes more memory, to which the received ones are copied."""
        return self.received_bytes == self.memory.nbytes

    @property
    def missing_bytes(self) -> int:
        return self._size_bytes - self.received_bytes

    def tail(self) -> memoryview:
        """Return where the next bytes belong. Raises `MemoryError`."""
        first = self.memory
        if self.received_bytes == first.nbytes:
            self.memory = aligned(self._size_bytes, self._json_bytes, self._take)
            self.memory[: first.nbytes] = first
        return self.memory[self.received_bytes :]

    def advance(self, size_bytes: int) -> bool:
        """Record ``size_bytes`` written to `tail`. Return True if the body is complete."""
        self.received_bytes += size_bytes
        return self.received_bytes == self._size_bytes


class ChunkedBody:
    """Collects a chunked ``body``. At the start of a chunk, ``judge`` gets the total bytes and chunks, and may raise.

    Extensions and trailers are dropped; their size is limited.
    """

    __slots__ = ("_chunks", "_judge", "_limits", "_missing", "_spare_bytes", "_trailers", "body", "has_more")

    def __init__(self, limits: HttpLimits, judge: Callable[[int, int], None]) -> None:
        self.body = bytearray()
        self.has_more = False
        self._limits, self._judge = limits, judge
        self._missing = 0  # bytes of this chunk and of its CRLF
        self._chunks = 0
        self._spare_bytes = 0
        self._trailers: bytearray | None = None

    def feed(self, received: bytearray) -> bool:
        """Take the bytes of the body from the front of ``received``. Return True if the body is complete.

        Takes at most `_PER_TURN` chunks, and sets `has_more` if there are more. Raises `Malformed`.
        """
        most, self.has_more = self._chunks + _PER_TURN, False
        while received:
            if self._missing > 2:
                size = min(self._missing - 2, len(received))
                with memoryview(received) as view:
                    self.body += view[:size]
                del received[:size]
                self._missing -= size
            elif self._missing:
                if not b"\r\n".startswith(received[:2]):
                    raise Malformed("a chunk is not as long as it says")
                if len(received) < 2:
                    return False
                del received[:2]
                self._missing = 0
            elif self._chunks >= most:
                self.has_more = True
                return False
            else:
                end = received.find(b"\n") + 1
                if not end:
                    self._bound(len(received))
                    return False
                line = bytes(received[:end])
                del received[:end]
                if line[-2:] != b"\r\n":
                    raise Malformed("a line of a chunked body does not end in CRLF")
                if self._trailers is None:
                    self._begin_chunk(line[:-2])
                elif line == b"\r\n":
                    read_fields(bytes(self._trailers), self._limits.headers)
                    return True
                else:
                    self._spare_bytes += end
                    self._bound(0)
                    self._trailers += line
        return False

    def _begin_chunk(self, line: bytes) -> None:
        self._spare_bytes += max(0, len(line) - _LINE_BYTES)
        self._bound(0)
        digits, semicolon, extension = line.partition(b";")
        if semicolon:
            digits = digits.rstrip(b" \t")
            read_fields(b"extension:" + extension + b"\r\n", 1)  # they have the characters of header values
        if not digits or digits.translate(None, _HEX) or len(digits.lstrip(b"0")) > _SIZE_DIGITS:
            raise Malformed("the size of a chunk is not a hexadecimal number")
        size = int(digits, 16)
        if size:
            self._chunks += 1
            self._judge(len(self.body) + size, self._chunks)
            self._missing = size + 2
        else:
            self._trailers = bytearray()

    def _bound(self, pending_bytes: int) -> None:
        if self._spare_bytes + pending_bytes > self._limits.head_bytes:
            what, status = ("chunk extensions", 400) if self._trailers is None else ("trailers", 431)
            raise Malformed(f"{what} exceed {self._limits.head_bytes} bytes", status)


def decompress(body: memoryview, limit_bytes: int, loop_limit_bytes: int, take: Take = new_memory) -> memoryview:
    """Return ``body`` decompressed, from gzip or zlib, in memory of ``take``.

    Raises `InvalidArgument` if it is empty, malformed, truncated, or larger than ``limit_bytes``, and `TooLargeForLoop`
    beyond ``loop_limit_bytes``.
    """
    if not body.nbytes:
        raise InvalidArgument("nothing to be decompressed")
    try:
        return inflate(body, _DETECT, limit_bytes, loop_limit_bytes, take)
    except CorruptData as error:
        raise InvalidArgument(f"compressed request body {error}") from None
    except TooLarge:
        raise inflated_too_large(limit_bytes) from None
