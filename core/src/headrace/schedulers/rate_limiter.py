"""Shares scarce resources among the instances of all models: ``--rate-limit=execution_count``.

An instance acquires the units of each resource that its instance group names before it runs a batch, and releases them
when the execution has returned. Of the instances that wait for the same resource, the one with the lowest product of
priority and executions is first. So an instance with priority 1 runs twice as often as one with priority 2.

Two rules prevent starvation:

- An instance that needs many units is not overtaken by instances behind it that need few.
- An instance that was overtaken more often than its share is first, before those with fewer executions.

Source: docs/spec/behaviours.md section 6.7.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count

from headrace.config.option_parts import RateLimitResource
from headrace.executors.devices import Resource, ResourceDemand
from headrace.executors.executor import Executor
from headrace.executors.threads import LoopWakeup, Wakeup
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import InstanceInfo
from headrace.schedulers.dispatcher import Dispatcher
from headrace.schedulers.instance_info import LimitedInstance
from headrace.schedulers.instance_source import InstanceSource
from headrace.schedulers.resource_limits import limits_for, shown
from headrace.schedulers.resource_use import ResourceUse
from headrace.telemetry.batch_history import IDLE_INSTANCE, RESOURCES, Closed
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)


class LimitedSource(InstanceSource):
    """The source of batches of an instance that needs resources to run them.

    `Scheduler.next` is called on the event loop only. The resources of an execution are released when it has returned:
    by `has_run` if the event loop ran it, else when the executor takes or polls again.
    """

    __slots__ = ("_limiter", "_record_unlimited", "demand", "executions", "is_running", "overtaken")

    is_limited = True

    def __init__(self, model_queue: Dispatcher, instance: LimitedInstance, limiter: RateLimiter) -> None:
        super().__init__(model_queue, instance)
        self.demand = instance.demand
        #: ``executions``: how often the instance has run. ``overtaken``: how often other instances that need one of its
        #: resources have run since it began to wait.
        self.executions = self.overtaken = 0
        #: True while the instance executes: it has acquired its resources.
        self.is_running = False
        self._limiter = limiter
        self._on_threads = False
        #: `BatchHistory.add`.
        self._record_unlimited = self._record
        self._record = self._record_wait

    def _record_wait(self, closed: Closed) -> None:
        """Record a batch, with `RESOURCES` as the reason if it waited for nothing else."""
        if closed[2] in ("", IDLE_INSTANCE) and self._limiter.is_waiting(self):
            closed = (*closed[:2], RESOURCES, *closed[3:])
        self._record_unlimited(closed)

    def is_using(self, resource: Resource) -> bool:
        """True if the instance executes and has acquired units of ``resource``."""
        return self.is_running and resource in self.demand.units

    @property
    def has_waiting(self) -> bool:
        """True if a request waits that the instance could run."""
        return len(self._model_queue.queue) > 0

    def _next_batch(self) -> list[Ticket]:
        if self.has_waiting and not self._limiter.admits(self):
            self.wait = None
            return []
        batch: list[Ticket] = []
        try:
            batch = super()._next_batch()
        finally:
            if batch:
                self._limiter.acquire(self)
            else:
                self._limiter.stop_waiting(self)
        return batch

    def take(self, wakeup: Wakeup) -> list[Ticket] | None:
        model_queue, idle = self._model_queue, self._model_queue.idle
        self._wakeup = wakeup
        while not self.closed:
            self.wake_at, self.wait = 0, None
            idle.append(self)
            with suppress(RuntimeError):  # the loop has ended, and so has the server
                model_queue.call_soon_threadsafe(self._execution_returned)
            wakeup.wait()
            batch, self._batch = self._batch, None
            if batch:
                return batch
        with suppress(RuntimeError):
            model_queue.call_soon_threadsafe(self._limiter.release, self)
        self._stand_by(wakeup)
        return None

    def poll(self, wakeup: LoopWakeup) -> list[Ticket] | None:
        self._limiter.release(self)
        return super().poll(wakeup)

    def has_run(self) -> None:
        self._limiter.release(self)

    def stop_polling(self, wakeup: LoopWakeup) -> None:
        self._limiter.stop_waiting(self)
        self._limiter.release(self)
        super().stop_polling(wakeup)

    def close(self) -> None:
        self._limiter.stop_waiting(self)
        super().close()

    def _execution_returned(self) -> None:
        """Release the resources of an execution on the instance's thread, which is idle now, and call `offer`."""
        self._limiter.release(self)
        if self.closed:
            self.close()
        else:
            self.ask_now()


class RateLimiter:
    """Limits the executions of all models of a server. ``loop`` is the server's event loop.

    ``given`` has the units of each resource that the operator has set. If it is empty, there are as many units of a
    resource as the neediest instance needs.

    `add`, `remove` and `uses` run on any thread, everything else on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Sequence[RateLimitResource] = ()) -> None:
        self._loop = loop
        self._operator_limits = limits
        self._lock = threading.Lock()
        #: The demand of each instance that is loaded or being loaded. Compared by identity. Guarded by the lock.
        self._demands: dict[ResourceDemand, None] = {}
        #: The units of each resource. Replaced, never changed.
        self._limits: Mapping[Resource, int] = {}
        #: Per resource, the sum of 1 / priority of the instances that need it, and their number. Replaced, never
        #: changed.
        self._competitors: Mapping[Resource, tuple[float, int]] = {}
        self._in_use: dict[Resource, int] = {}
        self._sources: dict[ResourceDemand, LimitedSource] = {}
        #: The sources with requests that may not run now, each with its number in the order of arrival.
        self._waiting: dict[LimitedSource, int] = {}
        self._numbers = count()
        self._is_offering_soon = False

    # ------------------------------------------------------------------ the instances

    def add(self, demands: Iterable[ResourceDemand]) -> None:
        """Add instances that are about to be loaded.

        Raises `ConfigError` if one of them could never run, or if they contradict others about a resource. Nothing is
        changed then.
        """
        demands = tuple(demands)
        with self._lock:
            together = self._demands | dict.fromkeys(demands)
            self._limits = limits_for(together, self._operator_limits)
            self._demands, self._competitors = together, _competitors(together)
        log.debug("%s", shown(self._limits))
        self._update_soon(demands)

    def remove(self, demands: Iterable[ResourceDemand]) -> None:
        """Remove instances, and release their resources. Ignore unknown instances."""
        demands = tuple(demands)
        with self._lock:
            left = {each: None for each in self._demands if each not in demands}
            self._limits = limits_for(left, self._operator_limits)
            self._demands, self._competitors = left, _competitors(left)
        log.debug("%s", shown(self._limits))
        self._update_soon(demands)

    def source(self, model_queue: Dispatcher, instance: InstanceInfo) -> InstanceSource:
        """Return the source of batches of ``instance``. It is a plain one if the instance needs no resources."""
        if not isinstance(instance, LimitedInstance):
            return InstanceSource(model_queue, instance)
        source = self._sources[instance.demand] = LimitedSource(model_queue, instance, self)
        return source

    def _update_soon(self, demands: Sequence[ResourceDemand]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and so has the server
            self._loop.call_soon_threadsafe(self._update, demands)

    def _update(self, demands: Sequence[ResourceDemand]) -> None:
        """Drop the sources of removed instances, after ``demands`` were added or removed."""
        for each in demands:
            if each not in self._demands and (source := self._sources.pop(each, None)) is not None:
                self._waiting.pop(source, None)
                self.release(source)
        self._offer_soon()

    # ------------------------------------------------------------------ the executions

    @property
    def in_use(self) -> Mapping[Resource, int]:
        """The units that are in use now, of each resource with any in use."""
        return {resource: units for resource, units in self._in_use.items() if units}

    def is_waiting(self, source: LimitedSource) -> bool:
        """True if ``source`` was not admitted when it last had something to run."""
        return source in self._waiting

    def uses(self, instances: Sequence[InstanceInfo] | None = None) -> list[ResourceUse]:
        """Return the use of all resources, or of the resources of ``instances``. Any thread."""
        needed = set(self._limits)
        if instances is not None:
            needed &= {key for each in instances if isinstance(each, LimitedInstance) for key in each.demand.units}
        sources, waiting = tuple(self._sources.values()), tuple(self._waiting)
        blocked = [source for source in waiting if not source.is_running and source.has_waiting]
        return [
            ResourceUse(
                resource,
                self._limits.get(resource, 0),
                {each.instance.name: each.demand.units[resource] for each in sources if each.is_using(resource)},
                {each.instance.name: each.demand.units[resource] for each in blocked if resource in each.demand.units},
            )
            for resource in sorted(needed, key=lambda each: each.order)
        ]

    def admits(self, source: LimitedSource) -> bool:
        """Return True if ``source``, which has requests to run, may run now. If not, it waits, and is offered the
        resources when they are released."""
        if not source.is_running and self._is_free(source.demand) and not self._is_behind(source):
            return True
        if source not in self._waiting:
            self._waiting[source] = next(self._numbers)
            log.debug("instance '%s' waits for %s", source.instance.name, source.demand)
        return False

    def blockers_of(self, executor: Executor) -> Sequence[Executor]:
        """Return the executors that ``executor`` waits for: those that use resources it needs, and those before it in
        line. Empty if it does not wait."""
        waiting = next((source for source in self._waiting if source.executor is executor), None)
        if waiting is None or not waiting.has_waiting:
            return ()
        rank = self._rank(waiting)
        return [
            other.executor
            for other in self._sources.values()
            if other is not waiting
            and other.executor is not None
            and other.demand.overlaps(waiting.demand)
            and (other.is_running or (other in self._waiting and other.has_waiting and self._rank(other) < rank))
        ]

    def acquire(self, source: LimitedSource) -> None:
        """Give ``source``, which runs a batch now, the units that it needs."""
        self._waiting.pop(source, None)
        source.is_running, source.overtaken = True, 0
        source.executions += 1
        for resource, units in source.demand.units.items():
            self._in_use[resource] = self._in_use.get(resource, 0) + units
        for other in self._waiting:
            if other.demand.overlaps(source.demand):
                other.overtaken += 1

    def stop_waiting(self, source: LimitedSource) -> None:
        """Remove ``source``, which has nothing to run, from the line. Those behind it may run now."""
        if self._waiting.pop(source, None) is not None:
            source.overtaken = 0
            self._offer_soon()

    def release(self, source: LimitedSource) -> None:
        """Take back the units of ``source``, whose execution has returned. Do nothing if it did not execute."""
        if not source.is_running:
            return
        source.is_running = False
        for resource, units in source.demand.units.items():
            self._in_use[resource] -= units
        self._offer_soon()

    def _is_free(self, demand: ResourceDemand) -> bool:
        in_use, limits = self._in_use, self._limits
        return all(
            in_use.get(resource, 0) + units <= limits.get(resource, 0) for resource, units in demand.units.items()
        )

    def _is_behind(self, source: LimitedSource) -> bool:
        """True if another source is before ``source`` in the line for one of its resources."""
        rank = self._rank(source)
        return any(
            other is not source
            and other.demand.overlaps(source.demand)
            and other.has_waiting
            and self._rank(other) < rank
            for other in self._waiting
        )

    def _rank(self, source: LimitedSource) -> tuple[bool, int, int, float]:
        """Return the sort key of ``source`` in the line; the lowest is first.

        In this order: overtaken more often than its share, few executions for its priority, a better priority, an
        earlier arrival.
        """
        demand = source.demand
        return (
            source.overtaken <= self._share(demand),
            source.executions * demand.priority,
            demand.priority,
            self._waiting.get(source, float("inf")),
        )

    def _share(self, demand: ResourceDemand) -> float:
        """Return how often an instance with ``demand`` is overtaken at most, if all instances wait all the time."""
        competitors = [self._competitors.get(resource, (0.0, 0)) for resource in demand.units]
        return sum(demand.priority * shares + 2 * number for shares, number in competitors)

    def _offer_soon(self) -> None:
        if self._waiting and not self._is_offering_soon:
            self._is_offering_soon = True
            self._loop.call_soon(self._offer)

    def _offer(self) -> None:
        """Offer the free resources to the waiting sources, in the order of the line."""
        self._is_offering_soon = False
        for source in sorted(self._waiting, key=self._rank):
            if source in self._waiting and not source.ask_now():
                self._waiting.pop(source, None)  # it is not idle, and polls when it is


def _competitors(demands: Iterable[ResourceDemand]) -> dict[Resource, tuple[float, int]]:
    competitors: dict[Resource, tuple[float, int]] = {}
    for each in demands:
        for resource in each.units:
            shares, number = competitors.get(resource, (0.0, 0))
            competitors[resource] = shares + 1 / each.priority, number + 1
    return competitors
