"""How an idle instance sleeps, and how the event loop wakes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


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


class LoopBell:
    """A wake-up for a worker that lives on the event loop: a ring calls ``wake``.

    ``wake_at`` as for `Bell`. ``alarm`` belongs to whoever rings, too: the timer that will.
    """

    __slots__ = ("_wake", "alarm", "wake_at")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.wake_at = 0
        self.alarm: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        self.silence()
        self._wake()

    def silence(self) -> None:
        """No alarm any more."""
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None
