"""How slow a caller may be: progress, and not total time, so that a slow caller with much to send is served."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Protocol

try:
    from fcntl import ioctl
    from termios import TIOCOUTQ
except ImportError:  # Windows
    ioctl = None  # type: ignore[assignment]


#: Of ``SO_LINGER``: what is closed is reset, and drops what it has not sent.
_AT_ONCE = struct.pack("ii", 1, 0)


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
