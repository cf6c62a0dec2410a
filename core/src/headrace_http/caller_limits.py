"""How much a caller may send, and how slow it may be, before the server says no.

Flags set ``input_bytes`` (``--http-max-input-size``), ``connections`` and what is said in seconds; the rest are far
from anything a client of Triton sends. Slowness is judged by progress, and not by total time, so that a slow caller
with much to send is served. Sources: docs/spec/behaviours.md sections 1.1, 1.3 and 14; docs/spec/security.md C11, C15.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.config.options import ServerOptions
from headrace.errors import InvalidArgument
from headrace_http.message import HEADER_LENGTH

try:
    from fcntl import ioctl
    from termios import TIOCOUTQ
except ImportError:  # Windows
    ioctl = None  # type: ignore[assignment]

#: What Triton's parser of ``Content-Length`` can hold, and so the largest body of all.
MAX_BODY_BYTES = 2**31 - 1
#: How often the host looks for connections whose time is over.
SWEEP_SECONDS = 1.0
#: Of ``SO_LINGER``: what is closed is reset, and drops what it has not sent.
_AT_ONCE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds on one connection; what is said in seconds is looked at every `SWEEP_SECONDS`, and 0 is for ever."""

    input_bytes: int = 64 * 1024 * 1024
    #: Of a head, and of the trailers or of the chunk extensions of a body.
    head_bytes: int = 64 * 1024
    headers: int = 128
    chunks: int = 65536
    #: Connections of one port.
    connections: int = 4096
    #: Bytes of large requests and of untaken answers of all connections of a port (`HeldBytes`).
    held_bytes: int = 0
    #: From its first byte, or from the beginning of the connection, to the end of a head.
    header_timeout_s: int = 60
    #: Between two requests.
    keepalive_timeout_s: int = 620
    #: What a body must arrive with, and an answer be taken with, in bytes a second (`Pace`).
    min_data_rate: int = 1024
    #: Without which progress they are given up after so long.
    stall_timeout_s: int = 30
    #: How long a refused caller is still listened to, so that it reads the refusal.
    linger_s: int = 30

    def body_limit(self, path: str, headers: Mapping[bytes, bytes]) -> int:
        """The most body bytes that this request may have.

        The binary tensors of an infer request are bounded by `MAX_BODY_BYTES` only.
        """
        has_tensors = headers.get(HEADER_LENGTH, b"0") != b"0" and path.endswith("/infer")
        return MAX_BODY_BYTES if has_tensors and not is_compressed(headers) else self.input_bytes

    def body_refusal(self, size_bytes: int, path: str, headers: Mapping[bytes, bytes]) -> InvalidArgument:
        """Why a body of ``size_bytes`` is refused. As in Triton, only inference reads the number as one of 32 bits."""
        if size_bytes > MAX_BODY_BYTES and path.endswith("/infer"):
            return InvalidArgument(
                f"Unable to parse Content-Length, value is out of range [ -2147483648, 2147483647 ], got: {size_bytes}"
            )
        if is_compressed(headers):
            return inflated_too_large(self.input_bytes)
        if headers.get(HEADER_LENGTH) == b"0":
            return raw_too_large(size_bytes, self.input_bytes)
        return json_too_large(size_bytes, self.input_bytes)


def flagged(options: ServerOptions) -> dict[str, int]:
    """The fields of `HttpLimits` that flags set for every port."""
    return {
        "connections": options.http_max_connections,
        "held_bytes": options.http_max_held_size,
        "header_timeout_s": options.http_header_timeout_secs,
        "keepalive_timeout_s": options.http_keepalive_timeout_secs,
        "min_data_rate": options.http_min_data_rate,
        "stall_timeout_s": options.http_stall_timeout_secs,
    }


def is_compressed(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-encoding", b"identity") not in (b"", b"identity")


def too_many_chunks(limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"Chunked request body exceeds maximum of {limit} non-empty chunks. Send fewer or larger HTTP chunks."
    )


def json_too_large(size_bytes: int, max_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"request JSON size of {size_bytes} bytes exceeds the maximum allowed input size of {max_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def raw_too_large(size_bytes: int, max_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"Raw input has a byte_size ({size_bytes} bytes) that exceeds the maximum allowed value of {max_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def inflated_too_large(limit_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"Decompressed data size exceeds the maximum allowed value of {limit_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


class Socket(Protocol):
    def fileno(self) -> int: ...
    def getsockopt(self, level: int, name: int, /) -> int: ...


class Pace:
    """Judges, once a second, what a caller has sent or taken.

    It may be below ``rate``, in bytes a second, for ``timeout_s``, and for that much longer as it was faster before,
    up to ``timeout_s`` again. 0 of either allows any.
    """

    __slots__ = ("_patience_s", "_rate", "_seen", "_timeout_s", "moved_bytes")

    def __init__(self, rate: int, timeout_s: int) -> None:
        self._rate, self._timeout_s = rate, timeout_s
        self.begin(0)

    def begin(self, count: int) -> None:
        """From here on, ``count`` bytes have been moved already."""
        self._patience_s, self._seen = float(self._timeout_s), count
        #: In the last second.
        self.moved_bytes = 0

    def is_too_slow(self, count: int) -> bool:
        """Whether the caller has been below the rate for too long; ``count`` bytes have been moved up to now."""
        self.moved_bytes, self._seen = max(0, count - self._seen), count
        if not self._rate or not self._timeout_s:
            return False
        self._patience_s = min(self._timeout_s, self._patience_s + self.moved_bytes / self._rate) - 1
        return self._patience_s < 0


def unsent_bytes(connection: Socket | None) -> int:
    """What the system holds for a caller who has not taken it yet: a megabyte may go there at once, and stay."""
    if ioctl is None or connection is None or connection.fileno() < 0:
        return 0
    return int.from_bytes(ioctl(connection.fileno(), TIOCOUTQ, bytes(4)), "little")


def has_left(connection: Socket | None) -> bool:
    """Whether a caller who has closed its side turned out to have closed the other side, too."""
    return connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


def reset(transport: asyncio.Transport) -> None:
    """Close so that the caller cannot take it for the end of what was sent."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()
