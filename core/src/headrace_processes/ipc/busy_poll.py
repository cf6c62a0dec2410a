"""Busy polling: poll for a message that is due in a moment, and sleep only if it does not arrive.

An idle core enters a sleep state. On a virtual machine it takes tens of microseconds to wake it, half of them in the
process that wakes it, and its caches are cold afterwards. For a small message that costs more than everything else. So
a thread that expects a message polls for a while, as mutexes do before they park a thread. After each poll it yields
the core to other threads.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from time import monotonic_ns
from typing import Final

#: After several waits in a row in which polling failed, at most this many waits follow without polling.
MAX_SLEEPS: Final = 63


class BusyPoller:
    """Decides if and how long to poll: at most ``limit_us`` a wait, and rarely if polling has failed lately.

    One wait at a time: call `begin`, then `may_repeat` after each poll without a message, and `succeed` when the
    message has arrived.
    """

    __slots__ = ("_began", "_failures", "_limit_ns", "_sleeps")

    def __init__(self, limit_us: int) -> None:
        self._limit_ns = limit_us * 1000
        self._began = self._sleeps = self._failures = 0

    def begin(self) -> bool:
        """True if this wait should poll. False: sleep."""
        if self._sleeps:
            self._sleeps -= 1
            return False
        self._began = monotonic_ns()
        return self._limit_ns > 0

    def may_repeat(self) -> bool:
        """Yield the core to other threads, then return True to poll again, or False to sleep: the limit is reached."""
        os.sched_yield()
        if monotonic_ns() - self._began < self._limit_ns:
            return True
        self._failures = self._sleeps = min(2 * self._failures + 1, MAX_SLEEPS)
        return False

    def succeed(self) -> None:
        """Note that the message arrived while polling: poll more often from now on."""
        self._failures >>= 1

    def receive(self, end: socket.socket, buffer: memoryview) -> int | None:
        """Poll ``end`` for bytes. Return how many were read into ``buffer``, or None if the caller should sleep."""
        is_awake = self.begin()
        while is_awake:
            try:
                received = end.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                is_awake = self.may_repeat()
            else:
                self.succeed()
                return received
        return None


class LoopBusyPoller:
    """Keeps the event loop from sleeping while ``is_due()``, and a little longer. The loop serves its sockets as usual.

    It polls only if the peer has sent something within the last ``busy_poll_us``: then the peer is awake. A sleeping
    peer should wake on this core rather than on a second one, so this core is kept free for it.
    """

    def __init__(self, busy_poll_us: int, is_due: Callable[[], object]) -> None:
        self._is_due = is_due
        self._loop = asyncio.get_running_loop()
        # After an answer, poll half as long for the client's next request: it arrives sooner than that, or too late
        # for any polling.
        self._waiting, self._lingering = BusyPoller(busy_poll_us), BusyPoller(busy_poll_us // 2)
        self._is_awake = self._is_lingering = False
        self._moment_ns = busy_poll_us * 1000
        self._received_ns = 0

    def received(self) -> None:
        """Note that the peer has sent something."""
        self._received_ns = monotonic_ns()

    def expect(self) -> None:
        """Start to poll: a message from the peer has just become due."""
        if monotonic_ns() - self._received_ns > self._moment_ns:
            return
        if self._is_lingering:
            self._is_lingering = False
            self._lingering.succeed()
        if self._waiting.begin() and not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Decide, once per turn of the loop, whether it runs another turn at once."""
        if self._is_lingering:
            self._is_lingering = self._is_awake = self._lingering.may_repeat()
        elif self._is_due():
            self._is_awake = self._waiting.may_repeat()
        else:
            self._waiting.succeed()
            self._is_lingering = self._is_awake = self._lingering.begin()
        if self._is_awake:
            self._loop.call_soon(self._poll)
