"""The manual clock and the simulated instances of the scheduler kit."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np

from headrace import Answer, InferResponse, Instance, InstanceInfo, Spec, Tensors, Ticket


class ManualClock:
    """A `headrace.Clock` that stands still until `advance`.

    It starts at ``now_ns``. A time of 0 would mean no deadline.
    """

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self._now_ns = now_ns
        self._timers: list[tuple[int, int, ManualTimer]] = []
        self._numbers = count()

    def now_ns(self) -> int:
        return self._now_ns

    def call_later(self, delay_ns: int, call: Callable[..., object], *arguments: object) -> ManualTimer:
        timer = ManualTimer(call, arguments)
        heapq.heappush(self._timers, (self._now_ns + max(delay_ns, 0), next(self._numbers), timer))
        return timer

    def advance(self, by_ns: int) -> None:
        """Move the time by ``by_ns``. Make the calls that become due, in order, each at its time."""
        end_ns = self._now_ns + by_ns
        while self._timers and self._timers[0][0] <= end_ns:
            due_ns, _, timer = heapq.heappop(self._timers)
            self._now_ns = max(self._now_ns, due_ns)
            timer.fire()
        self._now_ns = end_ns

    @property
    def next_ns(self) -> int | None:
        """The time of the next call; None if there is none."""
        return min((due_ns for due_ns, _, timer in self._timers if not timer.is_cancelled), default=None)

    @property
    def pending(self) -> int:
        """The number of scheduled calls."""
        return sum(not timer.is_cancelled for _, _, timer in self._timers)


class ManualTimer:
    """A call that is made when its clock reaches its time."""

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


class SimulatedInstance:
    """An instance that polls whenever it is idle, and runs its batch until `finish`."""

    def __init__(self, source: PolledSource, violations: list[str]) -> None:
        self.batch: list[Ticket] = []
        self._violations = violations
        self.name, self.source, self.wake = source.instance.name, source, self.poll
        #: All requests of this instance so far, in order.
        self.received: list[Ticket] = []

    def poll(self) -> None:
        if self.batch:
            return
        try:
            self.batch = self.source.poll(self) or []
        except Exception as error:  # from the scheduler, or from the model queue about the scheduler
            self._violations.append(str(error))
        self.received += self.batch

    def finish(self, error: Answer = None) -> None:
        """Answer each request of the batch with its own id, or with ``error`` if given. Then poll again."""
        batch, self.batch = self.batch, []
        self.source.deliver(batch, [error or InferResponse({}, id=ticket.request.id) for ticket in batch])
        self.poll()


class DoublingInstance(Instance):
    """Returns twice ``x`` as ``y``, and 0 for all other outputs."""

    def __init__(self, outputs: Mapping[str, Spec]) -> None:
        self._outputs = outputs

    def execute(self, inputs: Tensors) -> Tensors:
        x = np.asarray(inputs["x"])
        others = {n: np.zeros((len(x), *s.dims), s.datatype.numpy) for n, s in self._outputs.items() if n != "y"}
        return {"y": x + x, **others}
