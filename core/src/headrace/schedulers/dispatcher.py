"""Which instances of a version are idle, and how the event loop wakes them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import Clock, LoopClock, ScheduledModel, Scheduler, SchedulerContext, full, full_class
from headrace.schedulers.in_flight import RequestQueue
from headrace.telemetry.batch_history import BatchHistory

#: What counts as so many rows arrived: news that every instance has to look at, however many it is missing.
NEWS = 1 << 32


class InstanceToWake(Protocol):
    """As much of a `headrace.schedulers.instance_source.InstanceSource` as it takes to wake its instance."""

    wake_at: float
    calls_at_once: int

    @property
    def is_limited(self) -> bool: ...

    @property
    def runs_on_loop(self) -> bool: ...

    def offer(self) -> bool: ...

    def wake(self) -> None: ...


class Dispatcher(ABC):
    """Which instances are idle, and how they are woken: as much of the kernel as their sources see.

    ``sources`` are where the instances get their batches, in the order of ``instances``. ``last_ns`` is how long the
    last execution took. Event loop only, except `hand_on`, `choose_who_takes`, and what makes an
    `headrace.schedulers.base.Occupancy` of it.
    """

    sources: Sequence[InstanceToWake] = ()

    def __init__(
        self,
        kind: type[Scheduler],
        model: ScheduledModel,
        loop: asyncio.AbstractEventLoop,
        clock: Clock | None = None,
    ) -> None:
        self.clock = LoopClock(loop) if clock is None else clock
        self.closed = False
        self.arrived = 0  # rows; and `NEWS`
        self.last_ns = 0
        self.idle: deque[InstanceToWake] = deque()
        self.queue = RequestQueue()
        self.history = BatchHistory()
        #: A list of its own, which schedulers see change.
        self.instances = list(model.instances)
        self.call_soon, self.call_soon_threadsafe = loop.call_soon, loop.call_soon_threadsafe
        self._is_waking = False
        context = SchedulerContext(
            model.config,
            model.parameters,
            model.inputs,
            model.outputs,
            self.instances,
            self.clock,
            self.queue,
            self,
            model.call,
            self.answer,
            self.ask_again,
            model.held_until,
            model.others,
            model.directory,
        )
        self.scheduler = scheduler = kind(context)
        #: The same, or the defaults of what it does not have.
        self.full = full(scheduler)
        #: Outputs that the model gives and callers do not get.
        self.kept = frozenset(self.full.kept)
        #: Those of them that are none of the model's own outputs; and what else is kept from callers who asked for some
        #: outputs, and not for it.
        self.hidden = self.kept.difference(model.outputs)
        self.unasked: dict[Ticket, frozenset[str]] = {}
        reschedules = full_class(kind).reschedules(model.config)
        self.hears = bool(self.kept) or kind.finished is not Scheduler.finished or reschedules
        #: Whether the scheduler has ever had an instance wait for a fuller batch.
        self.forms_batches = False

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests submitted and not yet answered."""

    @property
    def at_once(self) -> int:
        """Executions that the instances can run side by side."""
        return sum([source.calls_at_once for source in self.sources])

    @abstractmethod
    def answer(self, ticket: Ticket, answer: Answer, final: bool = True) -> None: ...

    @abstractmethod
    def progress(self, ticket: Ticket, response: Answer) -> None: ...

    @abstractmethod
    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None: ...

    @abstractmethod
    def deliver_heard(self, source: Any, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None: ...

    def count_on(self, sources: Sequence[InstanceToWake]) -> None:
        """From now on ``sources`` are those of the instances."""
        self.sources = sources
        self._alike = self.scheduler.instances_alike and not any(source.is_limited for source in sources)
        self.choose_who_takes()

    def choose_who_takes(self) -> None:
        """Whether the event loop runs the batches of an instance has changed. Any thread."""
        #: Whether threads are only rung for, and take what is there once they are awake: one is as good as another,
        #: none of them leaves it to the event loop, and there is no batch to form, which the loop would do.
        self.threads_take = (
            self.scheduler.on_threads
            and self._alike
            and not self.forms_batches
            and not any(source.runs_on_loop for source in self.sources)
        )

    def ask_again(self) -> None:
        """Ask for all who are idle, soon."""
        self.arrived += NEWS
        self.wake_soon()

    def wake_soon(self) -> None:
        if self.idle and not self._is_waking:
            self._is_waking = True
            self.call_soon(self._wake)

    def hand_on(self) -> None:
        """Have another idle thread look at what one has left. Any thread."""
        if self.threads_take and len(self.queue):
            with suppress(IndexError):  # woken by somebody else in the meantime
                self.idle.popleft().wake()

    def _wake(self) -> None:
        """Offer what waits to the instances that are idle, those that form a batch first."""
        self._is_waking = False
        idle = self.idle
        for source in tuple(idle):
            if self.arrived < source.wake_at:
                if self._alike:
                    return
                continue
            try:
                idle.remove(source)
            except ValueError:  # its thread has looked by itself
                continue
            if not source.offer() and self._alike:
                return
