"""A clock that a test turns."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class TurnedClock:
    """A `headrace.Clock` that stands still until `turn`. It begins at ``now_ns``, which is not 0: requests that have
    no deadline have 0."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self._now_ns = now_ns
        self._timers: list[tuple[int, int, TurnedTimer]] = []
        self._numbers = count()

    def now_ns(self) -> int:
        return self._now_ns

    def call_later(self, delay_ns: int, call: Callable[..., object], *arguments: object) -> TurnedTimer:
        timer = TurnedTimer(call, arguments)
        heapq.heappush(self._timers, (self._now_ns + max(delay_ns, 0), next(self._numbers), timer))
        return timer

    def turn(self, by_ns: int) -> None:
        """Let ``by_ns`` pass. What is due meanwhile is called, in order, each at its time."""
        end_ns = self._now_ns + by_ns
        while self._timers and self._timers[0][0] <= end_ns:
            due_ns, _, timer = heapq.heappop(self._timers)
            self._now_ns = max(self._now_ns, due_ns)
            timer.fire()
        self._now_ns = end_ns

    @property
    def next_ns(self) -> int | None:
        """When the next call comes, if there is one to come."""
        return min((due_ns for due_ns, _, timer in self._timers if not timer.is_cancelled), default=None)

    @property
    def pending(self) -> int:
        """Calls that are still to come."""
        return sum(not timer.is_cancelled for _, _, timer in self._timers)


class TurnedTimer:
    """A call that comes when its clock is turned far enough."""

    def __init__(self, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.is_cancelled = False
        self._call, self._arguments = call, arguments

    def cancel(self) -> None:
        self.is_cancelled = True

    def fire(self) -> None:
        if not self.is_cancelled:
            self._call(*self._arguments)
