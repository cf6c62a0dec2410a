"""How an idle instance sleeps, and how the event loop wakes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Wakeup:
    """Wakes one thread. A `wake` before `wait` is not lost.

    ``wake_at`` belongs to whoever wakes it: how much must have arrived to be worth waking for.
    """

    __slots__ = ("_lock", "wake_at")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.wake_at = 0

    def wake(self) -> None:
        """Must not be called again before it has woken."""
        self._lock.release()

    def wait(self, timeout_ns: int | None = None) -> bool:
        """Sleep until woken (True) or until ``timeout_ns`` has passed (False)."""
        if timeout_ns is None:
            return self._lock.acquire()
        return self._lock.acquire(timeout=max(timeout_ns, 0) / 1e9)


class LoopWakeup:
    """Wakes a worker that lives on the event loop: `wake` calls ``call``.

    ``wake_at`` as for `Wakeup`. ``alarm`` belongs to whoever wakes it, too: the timer that will.
    """

    __slots__ = ("_call", "alarm", "wake_at")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.wake_at = 0
        self.alarm: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        self.cancel_alarm()
        self._call()

    def cancel_alarm(self) -> None:
        """No alarm any more."""
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None
