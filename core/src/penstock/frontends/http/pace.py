"""How slow a caller may be: progress, and not total time, so that a slow caller with much to send is served."""

from __future__ import annotations

import socket
from typing import Protocol

#: How long a caller may make no progress at all, or for how long it may save up what it was faster, in seconds.
PATIENCE_S = 30.0
try:
    from fcntl import ioctl
    from termios import TIOCOUTQ
except ImportError:  # Windows
    ioctl = None  # type: ignore[assignment]


class Socket(Protocol):
    def fileno(self) -> int: ...
    def getsockopt(self, level: int, name: int, /) -> int: ...


class Pace:
    """Judges, once a second, what a caller has sent or taken. ``rate`` is in bytes a second; 0 allows any."""

    __slots__ = ("_patience_s", "_rate", "_seen", "moved_bytes")

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self.begin(0)

    def begin(self, count: int) -> None:
        """From here on, ``count`` bytes have been moved already."""
        self._patience_s, self._seen = PATIENCE_S, count
        #: In the last second.
        self.moved_bytes = 0

    def is_too_slow(self, count: int) -> bool:
        """Whether the caller has been below the rate for too long; ``count`` bytes have been moved up to now."""
        self.moved_bytes, self._seen = max(0, count - self._seen), count
        if not self._rate:
            return False
        self._patience_s = min(PATIENCE_S, self._patience_s + self.moved_bytes / self._rate) - 1
        return self._patience_s < 0


def unsent_bytes(connection: Socket | None) -> int:
    """What the system holds for a caller who has not taken it yet: a megabyte may go there at once, and stay."""
    if ioctl is None or connection is None or connection.fileno() < 0:
        return 0
    return int.from_bytes(ioctl(connection.fileno(), TIOCOUTQ, bytes(4)), "little")


def has_left(connection: Socket | None) -> bool:
    """Whether a caller who has closed its side turned out to have closed the other side, too."""
    return connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
