"""The idle instances of a version, and how the event loop wakes them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from headrace.errors import plugin_errors
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import (
    Clock,
    LoopClock,
    ScheduledModel,
    Scheduler,
    SchedulerContext,
    full_scheduler_class,
    with_defaults,
)
from headrace.schedulers.in_flight import RequestQueue
from headrace.telemetry.batch_history import BatchHistory

#: The weight of a change that wakes every instance, even one that waits for a full batch: more than any rows.
WAKES_ALL = 1 << 32


class WakeableInstance(Protocol):
    """The part of `headrace.schedulers.instance_source.InstanceSource` that wakes its instance."""

    wake_at: float
    calls_at_once: int

    @property
    def is_limited(self) -> bool: ...

    @property
    def runs_on_loop(self) -> bool: ...

    def offer(self) -> bool: ...

    def wake(self) -> None: ...


class Dispatcher(ABC):
    """The base of `ModelQueue`: creates the scheduler and the queue, keeps the idle instances, and wakes them.

    ``sources`` give the instances their batches, in the order of ``instances``. ``last_ns`` is the duration of the last
    execution. Event loop only, except `hand_on`, `update_takers` and the `headrace.schedulers.base.Occupancy` part.
    """

    sources: Sequence[WakeableInstance] = ()

    def __init__(
        self,
        kind: type[Scheduler],
        model: ScheduledModel,
        loop: asyncio.AbstractEventLoop,
        clock: Clock | None = None,
    ) -> None:
        self.clock = LoopClock(loop) if clock is None else clock
        self.closed = False
        #: Counts changes: the rows of each request that arrives, and `WAKES_ALL` for each other change.
        self.change_count = 0
        self.last_ns = 0
        self.idle: deque[WakeableInstance] = deque()
        self.queue = RequestQueue()
        self.history = BatchHistory()
        #: A list of its own: schedulers see its changes.
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
            self.answer_for_scheduler,
            self.ask_again,
            model.delayed_start,
            model.others,
            model.directory,
        )
        with plugin_errors(f"scheduler '{kind.name}' cannot start for model '{model.config.name}'"):
            self.scheduler = scheduler = kind(context)
            #: The same object, or an object with the defaults.
            self.full_scheduler = with_defaults(scheduler)
        #: Outputs that every batch computes for `Scheduler.finished`. `hidden` are those that no caller gets.
        self.kept = frozenset(self.full_scheduler.kept)
        #: ``hidden``: the outputs to remove from each response. ``unasked``: for a request that names its outputs, the
        #: set to remove instead of ``hidden``.
        self.hidden = self.kept.difference(model.outputs)
        self.unasked: dict[Ticket, frozenset[str]] = {}
        reschedules = full_scheduler_class(kind).reschedules(model.config)
        #: True if `finish_and_deliver` must be called instead of `deliver`.
        self.calls_finished = bool(self.kept) or kind.finished is not Scheduler.finished or reschedules
        #: True once the scheduler has returned a `Wait`. It stays True.
        self.has_formed_batches = False

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests submitted and not yet answered."""

    @property
    def at_once(self) -> int:
        """Executions that the instances can run at the same time."""
        return sum([source.calls_at_once for source in self.sources])

    @abstractmethod
    def answer_for_scheduler(self, ticket: Ticket, answer: Answer, final: bool = True) -> None: ...

    @abstractmethod
    def progress(self, ticket: Ticket, response: Answer) -> None: ...

    @abstractmethod
    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None: ...

    @abstractmethod
    def finish_and_deliver(self, source: Any, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None: ...

    def use_sources(self, sources: Sequence[WakeableInstance]) -> None:
        """Use ``sources`` for the instances from now on."""
        self.sources = sources
        self._alike = self.scheduler.instances_alike and not any(source.is_limited for source in sources)
        self.update_takers()

    def update_takers(self) -> None:
        """Update ``threads_take``. Called when the event loop starts or stops running an instance's batches. Any
        thread."""
        #: True if the loop only wakes threads, and each takes its batch itself. For that, the scheduler must have
        #: `on_threads`, all instances must be alike, none may run on the event loop, and the scheduler must never have
        #: returned a `Wait`: the loop keeps the timers of a `Wait`.
        self.threads_take = (
            self.scheduler.on_threads
            and self._alike
            and not self.has_formed_batches
            and not any(source.runs_on_loop for source in self.sources)
        )

    def ask_again(self) -> None:
        """Call `Scheduler.next` soon for all idle instances."""
        self.change_count += WAKES_ALL
        self.wake_soon()

    def wake_soon(self) -> None:
        if self.idle and not self._is_waking:
            self._is_waking = True
            self.call_soon(self._wake)

    def hand_on(self) -> None:
        """Wake another idle thread for the requests that this one did not take. Any thread."""
        if self.threads_take and len(self.queue):
            with suppress(IndexError):  # another thread has woken it meanwhile
                self.idle.popleft().wake()

    def _wake(self) -> None:
        """Give the waiting requests to the idle instances, those that form a batch first."""
        self._is_waking = False
        idle = self.idle
        for source in tuple(idle):
            if self.change_count < source.wake_at:
                if self._alike:
                    return
                continue
            try:
                idle.remove(source)
            except ValueError:  # its thread has taken a batch itself
                continue
            if not source.offer() and self._alike:
                return
