"""Statistics of executions as plain integers, and the `Observer` of executions.

An instance counts with every batch, but readers read only every few seconds. So counting appends a few integers to a
list (`ExecutionCounter`), and hundreds of them are added up at once (`ExecutionStatistics.add_noted`). There are no
locks: each counter has one writer. A reader may see a batch that is half counted, but no torn number, and no number
that is lower than before. Source: docs/spec/behaviours.md sections 1.6 and 7.1.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code
from headrace.messages.ticket import Ticket

#: Upper bounds of the latency histograms in microseconds: 1, 2, 4, ... about 67 s, then +Inf.
LATENCY_BOUNDS_US = tuple(1 << power for power in range(27))
#: Upper bounds of the batch-size histogram.
BATCH_BOUNDS = tuple(1 << power for power in range(13))
#: Requests that are noted before they are added up.
MOST_NOTED = 512

_Integers: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class Duration:
    """The count and the total duration of one kind of event."""

    count: int = 0
    ns: int = 0

    def add(self, other: Duration) -> None:
        self.count += other.count
        self.ns += other.ns

    def add_all(self, count: int, ns: int) -> None:
        """Add ``count`` events that took ``ns`` together."""
        self.count += int(count)
        self.ns += int(ns)


class Histogram:
    """Counts per power-of-two bucket; the last bucket is +Inf. ``total`` is in the unit recorded."""

    __slots__ = ("counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def record(self, values: _Integers) -> None:
        """Count each value in the bucket of the first bound that is not below it, found by its exponent as a float."""
        _, exponents = np.frexp(np.maximum(values - 1, 0).astype(np.float64))
        size = len(self.counts)
        counts = np.bincount(np.minimum(exponents, size - 1), minlength=size)
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts.tolist(), strict=True)]
        self.total += int(values.sum())

    def add(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class BatchTimes(NamedTuple):
    """Times of one execution, in ``time.monotonic_ns``: the instance took the batch, the inputs
    were stacked, the engine returned, the answers were split."""

    start_ns: int
    input_end_ns: int
    infer_end_ns: int
    end_ns: int

    @property
    def spans(self) -> tuple[int, int, int]:
        """The durations of stacking, inferring and splitting."""
        return (
            self.input_end_ns - self.start_ns,
            self.infer_end_ns - self.input_end_ns,
            self.end_ns - self.infer_end_ns,
        )


class Observer(ABC):
    """Watches the executions of one model version. Chosen once per load by ``observe_model``."""

    @abstractmethod
    def batch_finished(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        """Called after each execution, and for an answer that a model gives after its execution.

        Called on the thread of an instance or on the event loop, possibly by several threads at once. It must be quick
        and must not block. An exception is logged and ignored."""


class FinishedInference(NamedTuple):
    """A finished inference, as `Recorder.add` gets it. Times are in ``time.monotonic_ns``, sizes in bytes of tensors.

    ``id`` and ``traceparent`` have at most 256 characters. ``code`` is None for a response. ``times`` are
    those of its last execution, None if there was none or if no `TimeKeeper` observes the model.
    """

    arrival_ns: int
    transport: str
    peer: str
    principal: str
    traceparent: str
    model: str
    version: int
    id: str
    request_bytes: int
    code: Code | None
    response_bytes: int
    ended_ns: int
    queued_ns: int
    times: BatchTimes | None


class Recorder(Protocol):
    """Takes the records of finished inferences, on the event loop."""

    @property
    def add(self) -> Callable[[tuple[Any, ...]], object]:
        """Called with a plain tuple, of which ``FinishedInference._make`` makes a `FinishedInference`. Read anew for
        each record. Must not block, and must not raise."""


class TimeKeeper(Observer):
    """Stores the times of an execution in its tickets, as ``times``."""

    def batch_finished(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        for ticket in succeeded:
            ticket.times = times
        for ticket in failed:
            ticket.times = times


class SpanKeeper(Observer):
    """Stores the durations of an execution in its tickets. Used for models that other models call."""

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
    """The statistics of one or more instances, added up."""

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

    def add(self, other: ExecutionStatistics) -> None:
        """Add the numbers of ``other``."""
        self.inference_count += other.inference_count
        self.execution_count += other.execution_count
        self.last_inference_ms = max(self.last_inference_ms, other.last_inference_ms)
        for name in ("success", "fail", "cancelled", "queue", "compute_input", "compute_infer", "compute_output"):
            getattr(self, name).add(getattr(other, name))
        for name in ("request_us", "queue_us", "compute_infer_us", "batch_size"):
            getattr(self, name).add(getattr(other, name))
        for size, batch in sorted(tuple(other.batches.items())):
            self.batches.setdefault(size, BatchStatistics()).add(batch)

    def add_noted(self, executions: list[int], requests: list[int]) -> None:
        """Add the notes of an `ExecutionCounter`. Requests whose execution is not noted yet are ignored."""
        if not executions:
            return
        noted: _Integers = np.array(executions, np.int64).reshape(-1, _EXECUTION)
        numbers, rows, starts, ends = noted[:, :4].T
        spans = noted[:, 4:]
        number = int(numbers.sum())
        if number:
            queued: _Integers = np.array(requests[: number * _REQUEST], np.int64).reshape(-1, _REQUEST)
            took, waited = np.repeat(ends, numbers) - queued[:, 0], np.repeat(starts, numbers) - queued[:, 1]
            self.inference_count += int(queued[:, 2].sum())
            self.success.add_all(number, took.sum())
            self.queue.add_all(number, waited.sum())
            for duration, ns in zip(self._computing(self), numbers @ spans, strict=True):
                duration.add_all(number, ns)
            self.request_us.record(took // 1000)
            self.queue_us.record(waited // 1000)
        has_run = rows > 0
        sizes, spans = rows[has_run], spans[has_run]
        self.execution_count += len(sizes)
        for size in sorted(set(sizes.tolist())):  # `np.unique` imports masked arrays first, for 40 ms
            alike = spans[sizes == size]
            per_batch = self.batches.setdefault(size, BatchStatistics())
            for duration, ns in zip(self._computing(per_batch), alike.sum(0), strict=True):
                duration.add_all(len(alike), ns)
        self.compute_infer_us.record(spans[:, 1] // 1000)
        self.batch_size.record(sizes)

    @staticmethod
    def _computing(numbers: ExecutionStatistics | BatchStatistics) -> tuple[Duration, Duration, Duration]:
        return numbers.compute_input, numbers.compute_infer, numbers.compute_output


#: Integers that are noted for an execution: requests answered, rows (0: do not count it as an execution), start, end,
#: and the durations of stacking, inferring and splitting. Times are in nanoseconds.
_EXECUTION = 7
#: Integers that are noted for a request, in the order of the executions: arrival, time when it was queued, rows.
_REQUEST = 3


class ExecutionCounter:
    """Counts the executions of one instance.

    Only one thread may write to it. An instance has one for its own thread, and one for answers that it gives after an
    execution, written by the event loop. Any thread may read `total`.
    """

    __slots__ = ("_noted",)

    def __init__(self, counted: ExecutionStatistics | None = None) -> None:
        #: The numbers added up so far; executions and requests noted since then. Replaced together, for readers.
        self._noted: tuple[ExecutionStatistics, list[int], list[int]] = (counted or ExecutionStatistics(), [], [])

    def total(self) -> ExecutionStatistics:
        """Return the sum of everything, in a new object."""
        counted, executions, requests = self._noted
        total = ExecutionStatistics()
        total.add(counted)
        total.add_noted(executions, requests)
        return total

    def record(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        """Count one batch. It counts as an execution if at least one request succeeded."""
        if failed:
            self._note_failed(failed, times.end_ns)
        if succeeded:
            start, end = times.start_ns, times.end_ns
            rows = self._note_requests(succeeded)
            inputs, infer = times.input_end_ns, times.infer_end_ns
            self._note((len(succeeded), rows, start, end, inputs - start, infer - inputs, end - infer))

    def record_alone(self, ticket: Ticket, start_ns: int, end_ns: int) -> None:
        """Count one successful request that ran alone. If it has no ``spans_ns``, all its time counts as inferring."""
        spans_ns = getattr(ticket, "spans_ns", (0, end_ns - start_ns, 0))
        self._note((1, self._note_requests((ticket,)), start_ns, end_ns, *spans_ns))

    def record_requests(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        """Count answered requests. Compute durations count once per request, as in Triton."""
        if failed:
            self._note_failed(failed, times.end_ns)
        if succeeded:
            self._note_requests(succeeded)
            self._note((len(succeeded), 0, times.start_ns, times.end_ns, *times.spans))

    def record_execution(self, batch: Sequence[Ticket], times: BatchTimes) -> None:
        """Count one execution of ``batch``. Its requests are counted later, when they are answered."""
        rows = sum([ticket.rows or 1 for ticket in batch])
        self._note((0, rows, times.start_ns, times.end_ns, *times.spans))

    def record_cancelled(self, cancelled: Sequence[Ticket], times: BatchTimes) -> None:
        """Count requests that were cancelled before they were answered."""
        counted = self._noted[0]
        for ticket in cancelled:
            counted.cancelled.add_all(1, times.end_ns - ticket.arrival_ns)

    def _note_failed(self, failed: Sequence[Ticket], end_ns: int) -> None:
        counted = self._noted[0]
        for ticket in failed:
            counted.fail.add_all(1, end_ns - ticket.arrival_ns)

    def _note_requests(self, succeeded: Sequence[Ticket]) -> int:
        """Note requests, before their execution is noted. Return the sum of their rows."""
        counted, _, requests = self._noted
        counted.last_inference_ms = time.time_ns() // 1_000_000
        total = 0
        for ticket in succeeded:
            rows = ticket.rows or 1
            total += rows
            requests += (ticket.arrival_ns, ticket.queued_ns, rows)
        return total

    def _note(self, execution: tuple[int, ...]) -> None:
        _, executions, requests = self._noted
        executions += execution
        if len(requests) >= MOST_NOTED * _REQUEST or len(executions) >= MOST_NOTED * _EXECUTION:
            self._noted = (self.total(), [], [])
