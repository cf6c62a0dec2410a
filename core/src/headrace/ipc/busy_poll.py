"""Busy polling: looking for a message that is due in a moment before sleeping until it comes.

A core with nothing to do goes to sleep. On a virtual machine it takes tens of microseconds to wake
again, half of which the waker pays, and then its caches are cold: for a small message that is more
than all the rest. So who expects one looks for it again and again for a while, as mutexes and
schedulers do before they park, and gives the core to whoever else wants it at each look.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from time import monotonic_ns
from typing import Final

#: Waits that are slept through at most, after others in a row were polled for in vain.
MOST_SLEEPS: Final = 63


class BusyPoller:
    """Decides how long to look: for ``limit_us``, but seldom where that was lately in vain.

    One wait at a time: `begin`, and then `lasts` after each look, or `end` when it has come.
    """

    __slots__ = ("_began", "_limit_ns", "_sleeps", "_vain")

    def __init__(self, limit_us: int) -> None:
        self._limit_ns = limit_us * 1000
        self._began = self._sleeps = self._vain = 0

    def begin(self) -> bool:
        """Whether to look at all."""
        if self._sleeps:
            self._sleeps -= 1
            return False
        self._began = monotonic_ns()
        return self._limit_ns > 0

    def lasts(self) -> bool:
        """Whether to look once more, after all others who want this core. False ends the wait."""
        os.sched_yield()
        if monotonic_ns() - self._began < self._limit_ns:
            return True
        self._vain = self._sleeps = min(2 * self._vain + 1, MOST_SLEEPS)
        return False

    def end(self) -> None:
        """It has come while we were awake."""
        self._vain >>= 1

    def receive(self, end: socket.socket, buffer: memoryview) -> int | None:
        """How many bytes have come into ``buffer``; None if that is to be slept for."""
        is_awake = self.begin()
        while is_awake:
            try:
                received = end.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                is_awake = self.lasts()
            else:
                self.end()
                return received
        return None


class LoopBusyPoller:
    """Keeps the event loop awake while ``is_due()`` and a little longer; its sockets are served as ever.

    Only for a process that was heard a moment ago, and so is awake itself. To wake another, it is better
    to leave it this core than to have it wake a second one.
    """

    def __init__(self, busy_poll_us: int, is_due: Callable[[], object]) -> None:
        self._is_due = is_due
        self._loop = asyncio.get_running_loop()
        # Half of it for the next request of whoever was answered: it comes sooner than an answer, or later than both.
        self._waiting, self._lingering = BusyPoller(busy_poll_us), BusyPoller(busy_poll_us // 2)
        self._is_awake = self._is_lingering = False
        self._moment_ns = busy_poll_us * 1000
        self._heard_ns = 0

    def heard(self) -> None:
        """Something that was due has come."""
        self._heard_ns = monotonic_ns()

    def stay(self) -> None:
        """Something has just become due."""
        if monotonic_ns() - self._heard_ns > self._moment_ns:
            return
        if self._is_lingering:
            self._is_lingering = False
            self._lingering.end()
        if self._waiting.begin() and not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self._is_lingering:
            self._is_lingering = self._is_awake = self._lingering.lasts()
        elif self._is_due():
            self._is_awake = self._waiting.lasts()
        else:
            self._waiting.end()
            self._is_lingering = self._is_awake = self._lingering.begin()
        if self._is_awake:
            self._loop.call_soon(self._look)
