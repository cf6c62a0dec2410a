"""The body of a request, as it arrives: in memory of its own, in chunks (RFC 9112, 7.1), or compressed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.errors import InvalidArgument
from headrace.frontends.inflating import CorruptData, TooLarge, inflate
from headrace_http.caller_limits import HttpLimits, inflated_too_large
from headrace_http.request_head import Malformed, read_fields

#: What engines like their tensors to start at; a cache line, and the width of AVX-512.
ALIGNMENT = 64
#: From here on a body of known length is received straight into its own memory.
DIRECT_BYTES = 64 * 1024
#: From here on NumPy asks for pages of 2 MiB, of which one byte takes a whole one. A body that large has `_FIRST_BYTES`
#: until the caller has filled those.
_HUGE_BYTES = 4 * 1024 * 1024
_FIRST_BYTES = 1024 * 1024
#: ``Content-Encoding`` values that a request may have.
DECODABLE = (b"", b"identity", b"gzip", b"deflate")
#: ``wbits`` of zlib for what is received: it is told apart by its first bytes.
_DETECT = 32 + 15
_HEX = b"0123456789abcdefABCDEF"
#: Digits of a size, without zeros in front, and what a line with a size may have without being bounded.
_SIZE_DIGITS, _LINE_BYTES = 15, 20
#: Chunks that are taken in one turn of the event loop: a fraction of a millisecond.
_PER_TURN = 32


def aligned(size_bytes: int, json_bytes: int) -> memoryview:
    """Memory for a body whose tensors begin after ``json_bytes``, at an aligned address.

    The operating system gives the pages as they are written: announcing bytes costs nothing.
    """
    memory = np.empty(size_bytes + ALIGNMENT, np.uint8)
    offset = -(memory.ctypes.data + json_bytes) % ALIGNMENT
    return memory[offset : offset + size_bytes].data


class DirectBody:
    """A body of known length in one piece of memory, which the socket fills.

    Announcing a body takes no memory: a large one has little until the caller has filled that.
    """

    __slots__ = ("_json_bytes", "_size_bytes", "memory", "received_bytes")

    def __init__(self, size_bytes: int, json_bytes: int) -> None:
        self._size_bytes, self._json_bytes = size_bytes, json_bytes
        self.memory = aligned(size_bytes if size_bytes < _HUGE_BYTES else _FIRST_BYTES, json_bytes)
        self.received_bytes = 0

    def append(self, data: bytes | bytearray) -> None:
        """Copy what came together with the head, which is less than `_FIRST_BYTES`."""
        end = self.received_bytes + len(data)
        self.memory[self.received_bytes : end] = data
        self.received_bytes = end

    def tail(self) -> memoryview:
        """Return where the next bytes belong. Raises `MemoryError`."""
        first = self.memory
        if self.received_bytes == first.nbytes:
            self.memory = aligned(self._size_bytes, self._json_bytes)
            self.memory[: first.nbytes] = first
        return self.memory[self.received_bytes :]

    def advance(self, size_bytes: int) -> bool:
        """Note that ``size_bytes`` were written to `tail`; true once the body is complete."""
        self.received_bytes += size_bytes
        return self.received_bytes == self._size_bytes


class ChunkedBody:
    """Gathers ``body``. ``judge`` is told the bytes and the chunks of which the body will consist when a chunk
    begins, and raises if those are too many.

    Everything beside the data itself (extensions, trailers) is thrown away, and bounded.
    """

    __slots__ = ("_chunks", "_judge", "_limits", "_missing", "_spare_bytes", "_trailers", "body", "has_more")

    def __init__(self, limits: HttpLimits, judge: Callable[[int, int], None]) -> None:
        self.body = bytearray()
        self.has_more = False
        self._limits, self._judge = limits, judge
        self._missing = 0  # bytes of this chunk and of the CRLF behind it
        self._chunks = 0
        self._spare_bytes = 0
        self._trailers: bytearray | None = None

    def feed(self, received: bytearray) -> bool:
        """Take what belongs to the body from the front of ``received``; true once the body is whole.

        Takes so many chunks and no more, and says `has_more` where there are. Raises `Malformed`.
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
            read_fields(b"extension:" + extension + b"\r\n", 1)  # they consist of what values consist of
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


def decompress(body: memoryview, limit_bytes: int, patience: int) -> memoryview:
    """``body`` inflated, gzip or zlib.

    Raises `InvalidArgument` if empty, malformed, truncated, or larger than ``limit_bytes``, and `TooLargeForLoop`
    beyond ``patience``.
    """
    if not body.nbytes:
        raise InvalidArgument("nothing to be decompressed")
    try:
        return inflate(body, _DETECT, limit_bytes, patience)
    except CorruptData as error:
        raise InvalidArgument(f"compressed request body {error}") from None
    except TooLarge:
        raise inflated_too_large(limit_bytes) from None
