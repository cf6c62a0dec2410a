"""The statistics of one model version, as plain integers.

Source: docs/spec/behaviours.md sections 1.6 and 7.1. `headrace.telemetry.executions` counts the executions; everything
else is counted on the event loop. `ModelStatistics.snapshot` adds everything up for readers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.telemetry.executions import Duration, ExecutionCounter, ExecutionStatistics
from headrace.telemetry.response_statistics import ResponseStatistics


@dataclass(slots=True)
class Snapshot:
    """The numbers of one model version, added up at one moment. Durations in nanoseconds."""

    executions: ExecutionStatistics
    rejected: Duration
    cancelled: Duration
    backend_failures: Duration
    other_failures: Duration
    cache_hit: Duration
    cache_miss: Duration
    cached: Duration
    cache_failures: int
    has_cache: bool
    pending: int
    load_ns: int
    restarts: int
    on_loop: int
    responses: ResponseStatistics

    @property
    def success(self) -> Duration:
        """Successful requests, including those answered by the cache, and the time that cache misses took."""
        return Duration(
            self.executions.success.count + self.cached.count,
            self.executions.success.ns + self.cached.ns + self.cache_miss.ns,
        )

    @property
    def queue(self) -> Duration:
        """Time of successful requests in the queue. Requests answered by the cache count with 0."""
        return Duration(self.executions.queue.count + self.cached.count, self.executions.queue.ns)

    @property
    def fail(self) -> Duration:
        """Failed requests, for all reasons."""
        total = Duration()
        for reason in (self.rejected, self.cancelled, self.backend_failures, self.other_failures):
            total.add(reason)
        return total


@dataclass(slots=True)
class ModelStatistics:
    """The numbers of one model version. Only the event loop writes them, except those in ``instances``."""

    rejected: Duration = field(default_factory=Duration)
    cancelled: Duration = field(default_factory=Duration)
    other_failures: Duration = field(default_factory=Duration)
    #: True if the model has a response cache.
    has_cache: bool = False
    #: Lookups that found an answer, or one in progress. Lookups that did not, with the time of storing the answer.
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    #: Requests that the cache has answered, with the time since their arrival.
    cached: Duration = field(default_factory=Duration)
    cache_failures: int = 0
    #: Called for each hit (True) and miss (False), with its nanoseconds.
    watch_cache: Callable[[bool, int], None] | None = None
    load_ns: int = 0
    #: Each response of a decoupled model.
    responses: ResponseStatistics = field(default_factory=ResponseStatistics)
    #: One counter per instance. The list is replaced, never changed, so any thread may read it.
    instances: list[ExecutionCounter] = field(default_factory=list)
    #: The sum of the counters of instances that have ended.
    _kept: ExecutionCounter = field(default_factory=ExecutionCounter)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def for_instance(self) -> ExecutionCounter:
        """Return a new counter. Only one thread may write to it."""
        counter = ExecutionCounter()
        with self._changing:
            self.instances = [*self.instances, counter]
        return counter

    def keep(self, ended: Sequence[ExecutionCounter]) -> None:
        """Replace the counters in ``ended`` by their sum: no thread writes to them any more. Any thread."""
        with self._changing:
            totals = ExecutionCounter(_sum([self._kept, *ended]))
            others = [counter for counter in self.instances if counter is not self._kept and counter not in ended]
            self.instances, self._kept = [*others, totals], totals

    def record_hit(self, arrival_ns: int, looked_up_ns: int, now_ns: int) -> None:
        """Count a request that the cache has answered: when it arrived, and when the lookup began. Event loop only."""
        hit, cached = self.cache_hit, self.cached
        hit.count += 1
        hit.ns += now_ns - looked_up_ns
        cached.count += 1
        cached.ns += now_ns - arrival_ns
        if self.watch_cache is not None:
            self.watch_cache(True, now_ns - looked_up_ns)

    def record_miss(self, spent_ns: int) -> None:
        """Count a request that was executed because the cache had no answer. Event loop only."""
        self.cache_miss.count += 1
        self.cache_miss.ns += spent_ns
        if self.watch_cache is not None:
            self.watch_cache(False, spent_ns)

    def snapshot(self, pending: int = 0, restarts: int = 0, on_loop: int = 0) -> Snapshot:
        """Return the sum of everything, with three numbers that others count.

        ``pending``: requests that wait in the scheduler. ``restarts``: restarts of model processes. ``on_loop``:
        instances that run on the event loop.
        """
        total = _sum(self.instances)
        cancelled = Duration(self.cancelled.count, self.cancelled.ns)
        cancelled.add(total.cancelled)
        return Snapshot(
            executions=total,
            rejected=self.rejected,
            cancelled=cancelled,
            backend_failures=total.fail,
            other_failures=self.other_failures,
            cache_hit=self.cache_hit,
            cache_miss=self.cache_miss,
            cached=self.cached,
            cache_failures=self.cache_failures,
            has_cache=self.has_cache,
            pending=pending,
            load_ns=self.load_ns,
            restarts=restarts,
            on_loop=on_loop,
            responses=self.responses,
        )


def _sum(counters: Sequence[ExecutionCounter]) -> ExecutionStatistics:
    total = ExecutionStatistics()
    for counter in counters:
        total.add(counter.total())
    return total
