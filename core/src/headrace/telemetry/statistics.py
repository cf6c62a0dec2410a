"""What a model has done, as plain integers.

Source: docs/spec/behaviours.md sections 1.6 and 7.1. What its instances execute is counted in
`headrace.telemetry.executions`, the rest on the event loop. Readers add it all up in `ModelStatistics.snapshot`.
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
        """Successful requests, those answered from the cache included, and what misses have cost."""
        return Duration(
            self.executions.success.count + self.cached.count,
            self.executions.success.ns + self.cached.ns + self.cache_miss.ns,
        )

    @property
    def queue(self) -> Duration:
        """Successful requests in the queue, where those answered from the cache were for no time."""
        return Duration(self.executions.queue.count + self.cached.count, self.executions.queue.ns)

    @property
    def fail(self) -> Duration:
        """Failed requests of every reason."""
        total = Duration()
        for reason in (self.rejected, self.cancelled, self.backend_failures, self.other_failures):
            total.add(reason)
        return total


@dataclass(slots=True)
class ModelStatistics:
    """The numbers of one model version. Written on the event loop, but for ``instances``."""

    rejected: Duration = field(default_factory=Duration)
    cancelled: Duration = field(default_factory=Duration)
    other_failures: Duration = field(default_factory=Duration)
    #: Whether answers are kept: the numbers of the response cache mean something.
    has_cache: bool = False
    #: What looking up took where it found an answer, or one that was on its way; and where it did not, with keeping it.
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    #: Requests that the cache has answered, from their arrival on.
    cached: Duration = field(default_factory=Duration)
    cache_failures: int = 0
    #: Told of each hit (True) and miss, with its nanoseconds.
    watch_cache: Callable[[bool, int], None] | None = None
    load_ns: int = 0
    #: Each response of a decoupled model.
    responses: ResponseStatistics = field(default_factory=ResponseStatistics)
    #: Replaced, never changed.
    instances: list[ExecutionCounter] = field(default_factory=list)
    #: Of instances that have left.
    _kept: ExecutionCounter = field(default_factory=ExecutionCounter)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def for_instance(self) -> ExecutionCounter:
        """A new object for one thread to write."""
        counter = ExecutionCounter()
        with self._changing:
            self.instances = [*self.instances, counter]
        return counter

    def keep(self, ended: Sequence[ExecutionCounter]) -> None:
        """Nobody writes to ``ended`` any more: keep what they say in one object. Any thread."""
        with self._changing:
            kept = ExecutionCounter(_sum([self._kept, *ended]))
            others = [counter for counter in self.instances if counter is not self._kept and counter not in ended]
            self.instances, self._kept = [*others, kept], kept

    def record_hit(self, arrival_ns: int, asked_ns: int, now_ns: int) -> None:
        """The cache has answered a request that had arrived, and asked it, at these times. Event loop only."""
        hit, cached = self.cache_hit, self.cached
        hit.count += 1
        hit.ns += now_ns - asked_ns
        cached.count += 1
        cached.ns += now_ns - arrival_ns
        if self.watch_cache is not None:
            self.watch_cache(True, now_ns - asked_ns)

    def record_miss(self, spent_ns: int) -> None:
        """A request has been executed, because the cache had no answer. Event loop only."""
        self.cache_miss.count += 1
        self.cache_miss.ns += spent_ns
        if self.watch_cache is not None:
            self.watch_cache(False, spent_ns)

    def snapshot(self, pending: int = 0, restarts: int = 0, on_loop: int = 0) -> Snapshot:
        """Everything added up. ``pending`` is the scheduler's count of waiting requests, ``restarts`` the hosts', and
        ``on_loop`` is how many instances the event loop runs."""
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
