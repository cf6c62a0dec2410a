"""Limits: how much a caller may send, and how slow it may be.

Flags set ``input_bytes`` (``--http-max-input-size``), ``connections`` and the times. The other limits are far above
what clients of Triton send. A caller is slow by its rate, not by its total time, so a slow caller with much to send is
served. Sources: docs/spec/behaviours.md sections 1.1, 1.3 and 14; docs/spec/security.md C11, C15.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.config.option_parts import HttpLimitOptions
from headrace.errors import InvalidArgument
from headrace_http.message import HEADER_LENGTH, BodyTooLarge

try:
    from fcntl import ioctl
    from termios import TIOCOUTQ
except ImportError:  # Windows
    ioctl = None  # type: ignore[assignment]

#: The largest ``Content-Length`` that Triton's parser can hold, and so the largest body.
MAX_BODY_BYTES = 2**31 - 1
#: Time limits of connections are checked once per second.
SWEEP_SECONDS = 1.0
#: The value of ``SO_LINGER`` with which a close resets the connection and drops unsent bytes.
_AT_ONCE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one connection. Times are checked every `SWEEP_SECONDS`; 0 is no limit."""

    input_bytes: int = 64 * 1024 * 1024
    #: For the binary tensors of an infer request.
    tensor_bytes: int = MAX_BODY_BYTES
    #: For a head, and for the trailers or chunk extensions of a body.
    head_bytes: int = 64 * 1024
    headers: int = 128
    chunks: int = 65536
    #: Connections of one port.
    connections: int = 4096
    #: Bytes of large requests and unread answers of all connections of a port (`HeldBytes`); 0 is no limit but the
    #: memory budget.
    held_bytes: int = 0
    #: From the first byte of a head, or from the start of the connection, to its end.
    header_timeout_s: int = 60
    #: Between two requests.
    keepalive_timeout_s: int = 620
    #: The minimum rate of a body and of an answer, in bytes per second (`StallTimer`).
    min_data_rate: int = 1024
    #: After this time below the rate, the connection is closed.
    stall_timeout_s: int = 30
    #: After a refusal, input is read and dropped for this time, so that the caller can read the refusal.
    linger_s: int = 30
    #: Returns the limit of the route at a path, `HttpRoute.max_body_bytes`; None if it has none of its own.
    of_route: Callable[[str], int | None] = lambda path: None

    def stall_timer(self) -> StallTimer:
        """Return what judges how fast one caller sends or takes."""
        return StallTimer(self.min_data_rate, self.stall_timeout_s)

    def body_limit(self, path: str, headers: Mapping[bytes, bytes]) -> int:
        """Return the limit of this request's body, in bytes."""
        own_bytes = self.of_route(path)
        if own_bytes is not None:
            return own_bytes
        has_tensors = headers.get(HEADER_LENGTH, b"0") != b"0" and path.endswith("/infer")
        return self.tensor_bytes if has_tensors and not is_compressed(headers) else self.input_bytes

    def body_refusal(self, size_bytes: int, path: str, headers: Mapping[bytes, bytes]) -> InvalidArgument:
        """Return the refusal of a body of ``size_bytes``. As in Triton, only inference parses the number as 32 bits."""
        own_bytes = self.of_route(path)
        if own_bytes is not None:
            return BodyTooLarge(f"the body of the request has {size_bytes} bytes, the limit is {own_bytes}")
        if size_bytes > MAX_BODY_BYTES and path.endswith("/infer"):
            return InvalidArgument(
                f"Unable to parse Content-Length, value is out of range [ -2147483648, 2147483647 ], got: {size_bytes}"
            )
        if is_compressed(headers):
            return inflated_too_large(self.input_bytes)
        if headers.get(HEADER_LENGTH) == b"0":
            return raw_too_large(size_bytes, self.input_bytes)
        return json_too_large(size_bytes, self.input_bytes)


def port_limits(options: HttpLimitOptions, max_body_bytes: int | None = None) -> HttpLimits:
    """Return the limits that flags set for every port, with the port's own for every body if it has one."""
    return HttpLimits(
        input_bytes=options.http_max_input_size if max_body_bytes is None else max_body_bytes,
        tensor_bytes=MAX_BODY_BYTES if max_body_bytes is None else max_body_bytes,
        connections=options.http_max_connections,
        held_bytes=options.http_max_held_size,
        header_timeout_s=options.http_header_timeout_secs,
        keepalive_timeout_s=options.http_keepalive_timeout_secs,
        min_data_rate=options.http_min_data_rate,
        stall_timeout_s=options.http_stall_timeout_secs,
    )


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


def larger_than_memory(size_bytes: int, max_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"request body size of {size_bytes} bytes exceeds the {max_bytes} bytes that all requests and responses may "
        "take together. Use --memory-budget to increase the limit."
    )


class Socket(Protocol):
    def fileno(self) -> int: ...
    def getsockopt(self, level: int, name: int, /) -> int: ...


class StallTimer:
    """Checks once per second how fast a caller sends or reads.

    The caller may be below ``rate``, in bytes per second, for ``timeout_s``. Time at a higher rate is credited, up to
    ``timeout_s``. 0 for either one turns the check off.
    """

    __slots__ = ("_patience_s", "_rate", "_seen", "_timeout_s", "moved_bytes")

    def __init__(self, rate: int, timeout_s: int) -> None:
        self._rate, self._timeout_s = rate, timeout_s
        self.begin(0)

    def begin(self, count: int) -> None:
        """Start a new measurement at ``count`` bytes."""
        self._patience_s, self._seen = float(self._timeout_s), count
        #: bytes in the last second
        self.moved_bytes = 0

    def is_too_slow(self, count: int) -> bool:
        """True if the caller has been below the rate for too long. ``count`` is the number of bytes so far."""
        self.moved_bytes, self._seen = max(0, count - self._seen), count
        if not self._rate or not self._timeout_s:
            return False
        self._patience_s = min(self._timeout_s, self._patience_s + self.moved_bytes / self._rate) - 1
        return self._patience_s < 0


def unsent_bytes(connection: Socket | None) -> int:
    """Return the bytes in the socket's send buffer, which may hold a megabyte that the caller has not read."""
    if ioctl is None or connection is None or connection.fileno() < 0:
        return 0
    return int.from_bytes(ioctl(connection.fileno(), TIOCOUTQ, bytes(4)), "little")


def has_left(connection: Socket | None) -> bool:
    """True if a caller that has closed its sending side has closed the other side, too."""
    return connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


def reset(transport: asyncio.Transport) -> None:
    """Reset the connection, so that the caller does not mistake this for the end of the answer."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()
