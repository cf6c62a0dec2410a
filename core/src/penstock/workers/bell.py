"""How an idle instance thread sleeps, and how the event loop wakes it."""

from __future__ import annotations

import threading


class Bell:
    """A wake-up for one thread. A ring before `wait` is not lost.

    ``wake_at`` belongs to whoever rings: how much must have arrived to be worth waking for.
    """

    __slots__ = ("_lock", "wake_at")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.wake_at = 0

    def ring(self) -> None:
        """Wake the thread. Must not be called again before it has woken."""
        self._lock.release()

    def wait(self, timeout_ns: int | None = None) -> bool:
        """Sleep until rung (True) or until ``timeout_ns`` has passed (False)."""
        if timeout_ns is None:
            return self._lock.acquire()
        return self._lock.acquire(timeout=max(timeout_ns, 0) / 1e9)
