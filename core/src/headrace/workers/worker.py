"""What runs an instance, a thread of the server or a process of its own; where its batches come from; what wakes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.observer import Observer


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


class BatchSource(Protocol):
    """Where batches come from and go back to: a `headrace.schedulers.base.Scheduler`.

    A worker on a thread of its own takes batches, one that lives on the event loop polls for them; a
    wakeup tells either when to look again.
    """

    def take(self, wakeup: Wakeup) -> list[Ticket] | None: ...

    def poll(self, wakeup: LoopWakeup) -> list[Ticket] | None: ...

    def leave(self, wakeup: LoopWakeup) -> None: ...

    def progress(self, ticket: Ticket, response: Answer) -> None:
        """An answer that is not the last. Event loop only."""

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """Last answers. Event loop only."""


class Worker(Protocol):
    """One instance, from load to close. The loading thread calls `load`, `serve` and `join`."""

    @property
    def name(self) -> str:
        """The instance's."""

    @property
    def alive(self) -> bool:
        """Whether the instance can execute. False before `load`, and between a crash and the restart."""

    @property
    def reason(self) -> str:
        """Why it is not alive, or last was not: one line, then the last traceback. Empty if it always was."""

    @property
    def restarts(self) -> int:
        """How often the instance has been loaded again after it had died."""

    @property
    def executing(self) -> Sequence[Ticket]:
        """The batch that keeps the instance from taking another; empty while it is free."""

    @property
    def has_check(self) -> bool:
        """Whether the instance has something of its own to say in `check_ready`."""

    def load(self) -> None:
        """Wait until the instance is loaded and warmed up; raises what loading raised."""

    def serve(self, source: BatchSource, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer] = ()) -> None:
        """Begin to pull batches from ``source`` and to deliver on ``loop``."""

    def join(self) -> None:
        """Wait until the instance has closed. The source must have been closed before."""

    def check_ready(self) -> bool:
        """What the instance's ``is_ready`` says now; False while it is not `alive`.

        May block for as long as the instance's author likes, and raise what that author raises:
        call it on a thread of its own, one call at a time.
        """
