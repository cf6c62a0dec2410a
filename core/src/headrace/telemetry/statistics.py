"""What a model has done, as plain integers, and what an observer of its executions implements.

Nothing here locks. Each writer has its own object and is its only writer: an instance thread
writes its `ExecutionStatistics` once per batch, the event loop writes those of late answers and
the rest of `ModelStatistics`. Readers add the objects up in `ModelStatistics.snapshot` and may see a batch
half counted, never a torn number. Source: docs/spec/behaviours.md sections 1.6 and 7.1.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.messages.ticket import Ticket

#: Upper bounds of the latency histograms in microseconds: 1, 2, 4, ... about 67 s, then +Inf.
#: Powers of two, so that a duration finds its bucket by ``int.bit_length`` alone.
LATENCY_BOUNDS_US = tuple(1 << power for power in range(27))
#: Upper bounds of the batch-size histogram.
BATCH_BOUNDS = tuple(1 << power for power in range(13))


@dataclass(slots=True)
class Duration:
    """How often something happened, and how long it took altogether."""

    count: int = 0
    ns: int = 0

    def add(self, other: Duration) -> None:
        self.count += other.count
        self.ns += other.ns


class Histogram:
    """Counts per power-of-two bucket; the last bucket is +Inf. ``total`` is in the unit recorded."""

    __slots__ = ("counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def record(self, value: int) -> None:
        counts = self.counts
        bucket = (value - 1).bit_length() if value > 1 else 0
        counts[bucket if bucket < len(counts) else -1] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True, frozen=True)
class BatchTimes:
    """Boundaries of one execution, ``time.monotonic_ns``: the instance took the batch, the inputs
    were stacked, the engine returned, the answers were split."""

    start_ns: int
    input_end_ns: int
    infer_end_ns: int
    end_ns: int

    @property
    def spans(self) -> tuple[int, int, int]:
        """What stacking, inferring and splitting took."""
        return (
            self.input_end_ns - self.start_ns,
            self.infer_end_ns - self.input_end_ns,
            self.end_ns - self.infer_end_ns,
        )


class Observer(ABC):
    """Watches the executions of one model version. Chosen once per load by ``observe_model``."""

    @abstractmethod
    def batch_finished(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        """One execution is over, or a late answer of one has come. Called on an instance's thread or
        on the event loop, possibly several at once: must be quick and must not block. A raise is
        logged and ignored."""


class SpanKeeper(Observer):
    """Has the tickets of a model that others ask say what answering took, for those who add it up."""

    def batch_finished(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        spans_ns = times.spans
        for ticket in succeeded:
            ticket.spans_ns = spans_ns


@dataclass(slots=True)
class BatchStatistics:
    """Executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, other: BatchStatistics) -> None:
        self.compute_input.add(other.compute_input)
        self.compute_infer.add(other.compute_infer)
        self.compute_output.add(other.compute_output)


@dataclass(slots=True)
class ExecutionStatistics:
    """What one instance has executed. Written by one thread only: an instance has an object that its
    own thread writes, and one for what it answers after its executions, which the event loop writes."""

    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    cancelled: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    request_us: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_US))
    queue_us: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_US))
    compute_infer_us: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_US))
    batch_size: Histogram = field(default_factory=lambda: Histogram(BATCH_BOUNDS))

    def record(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        """Add one batch; it counts as an execution if anything succeeded."""
        self.record_requests(succeeded, failed, times)
        if succeeded:
            self.record_execution(succeeded, times)

    def record_alone(self, ticket: Ticket, start_ns: int, end_ns: int) -> None:
        """`record` of one request that succeeded, which ran by itself. Unless its ``spans_ns`` say more, it did nothing
        but infer."""
        rows, total_ns, queued_ns = ticket.rows or 1, end_ns - ticket.arrival_ns, start_ns - ticket.queued_ns
        input_ns, took_ns, output_ns = getattr(ticket, "spans_ns", (0, end_ns - start_ns, 0))
        self.inference_count += rows
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        per_batch = self.batches.get(rows)
        if per_batch is None:
            per_batch = self.batches[rows] = BatchStatistics()
        for duration, ns in (
            (self.success, total_ns),
            (self.queue, queued_ns),
            (self.compute_input, input_ns),
            (self.compute_infer, took_ns),
            (self.compute_output, output_ns),
            (per_batch.compute_input, input_ns),
            (per_batch.compute_infer, took_ns),
            (per_batch.compute_output, output_ns),
        ):
            duration.count += 1
            duration.ns += ns
        self.request_us.record(total_ns // 1000)
        self.queue_us.record(queued_ns // 1000)
        self.compute_infer_us.record(took_ns // 1000)
        self.batch_size.record(rows)

    def record_requests(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        """Add what has become of requests. Compute durations count once per request, as Triton counts them."""
        start, end, number = times.start_ns, times.end_ns, len(succeeded)
        for ticket in failed:
            self.fail.count += 1
            self.fail.ns += end - ticket.arrival_ns
        if not number:
            return
        rows = total = queued = 0
        record_request, record_queue = self.request_us.record, self.queue_us.record
        for ticket in succeeded:
            rows += ticket.rows or 1
            took, waited = end - ticket.arrival_ns, start - ticket.queued_ns
            total += took
            queued += waited
            record_request(took // 1000)
            record_queue(waited // 1000)
        self.inference_count += rows
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.success.count += number
        self.success.ns += total
        self.queue.count += number
        self.queue.ns += queued
        for duration, took in zip(
            (self.compute_input, self.compute_infer, self.compute_output), times.spans, strict=True
        ):
            duration.count += number
            duration.ns += took * number

    def record_cancelled(self, cancelled: Sequence[Ticket], times: BatchTimes) -> None:
        """Add requests whose callers had gone before they were answered."""
        for ticket in cancelled:
            self.cancelled.count += 1
            self.cancelled.ns += times.end_ns - ticket.arrival_ns

    def record_execution(self, batch: Sequence[Ticket], times: BatchTimes) -> None:
        """Add one execution of ``batch``."""
        rows = sum([ticket.rows or 1 for ticket in batch])
        self.execution_count += 1
        per_batch = self.batches.get(rows)
        if per_batch is None:
            per_batch = self.batches[rows] = BatchStatistics()
        spans = times.spans
        for duration, took in zip(
            (per_batch.compute_input, per_batch.compute_infer, per_batch.compute_output), spans, strict=True
        ):
            duration.count += 1
            duration.ns += took
        self.compute_infer_us.record(spans[1] // 1000)
        self.batch_size.record(rows)

    def add(self, other: ExecutionStatistics) -> None:
        """Add another object's numbers to this one's; for snapshots."""
        self.inference_count += other.inference_count
        self.execution_count += other.execution_count
        self.last_inference_ms = max(self.last_inference_ms, other.last_inference_ms)
        for name in ("success", "fail", "cancelled", "queue", "compute_input", "compute_infer", "compute_output"):
            getattr(self, name).add(getattr(other, name))
        for name in ("request_us", "queue_us", "compute_infer_us", "batch_size"):
            getattr(self, name).add(getattr(other, name))
        for size, batch in sorted(tuple(other.batches.items())):
            self.batches.setdefault(size, BatchStatistics()).add(batch)


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
    #: Replaced, never changed.
    instances: list[ExecutionStatistics] = field(default_factory=list)
    #: Of instances that have left.
    _kept: ExecutionStatistics = field(default_factory=ExecutionStatistics)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def for_instance(self) -> ExecutionStatistics:
        """A new object for one thread to write."""
        statistics = ExecutionStatistics()
        with self._changing:
            self.instances = [*self.instances, statistics]
        return statistics

    def keep(self, ended: Sequence[ExecutionStatistics]) -> None:
        """Nobody writes to ``ended`` any more: keep what they say in one object. Any thread."""
        kept = ExecutionStatistics()
        for statistics in ended:
            kept.add(statistics)
        with self._changing:
            kept.add(self._kept)
            gone = {id(statistics) for statistics in (self._kept, *ended)}
            others = [statistics for statistics in self.instances if id(statistics) not in gone]
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
        total = ExecutionStatistics()
        for instance in tuple(self.instances):
            total.add(instance)
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
        )
