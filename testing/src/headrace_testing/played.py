"""What the kit for schedulers plays: time, which a test turns, and instances, which finish when they are told to."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np

from headrace import Answer, InferResponse, Instance, InstanceInfo, Spec, Tensors, Ticket


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


class PolledSource(Protocol):
    """One of the ``sources`` of a `headrace.SchedulerHarness`."""

    @property
    def instance(self) -> InstanceInfo: ...

    @property
    def deliver(self) -> Callable[[Sequence[Ticket], Sequence[Answer]], None]: ...

    def poll(self, wakeup: Any) -> list[Ticket] | None: ...


class PlayedInstance:
    """An instance that asks whenever it is free, and keeps what it gets until it is told to `finish`."""

    def __init__(self, source: PolledSource, wrong: list[str]) -> None:
        self.batch: list[Ticket] = []
        self._wrong = wrong
        self.name, self.source, self.wake = source.instance.name, source, self.ask
        #: All that it was ever given, in order.
        self.given: list[Ticket] = []

    def ask(self) -> None:
        if self.batch:
            return
        try:
            self.batch = self.source.poll(self) or []
        except Exception as error:  # what the scheduler raised, or the model queue about what it said
            self._wrong.append(str(error))
        self.given += self.batch

    def finish(self, error: Answer = None) -> None:
        """Answer what it has, each request by its own id or all with ``error``, and ask again."""
        batch, self.batch = self.batch, []
        self.source.deliver(batch, [error or InferResponse({}, id=ticket.request.id) for ticket in batch])
        self.ask()


class DoublingInstance(Instance):
    """``y`` is twice ``x``; what else the model is to give is 0."""

    def __init__(self, outputs: Mapping[str, Spec]) -> None:
        self._outputs = outputs

    def execute(self, inputs: Tensors) -> Tensors:
        x = np.asarray(inputs["x"])
        others = {n: np.zeros((len(x), *s.dims), s.datatype.numpy) for n, s in self._outputs.items() if n != "y"}
        return {"y": x + x, **others}
