"""The recorded executions have the totals of a plain sum, for any number of them and of readers."""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_left
from collections import Counter
from typing import Any

import pytest

from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import (
    BATCH_BOUNDS,
    LATENCY_BOUNDS_US,
    MOST_NOTED,
    BatchTimes,
    ExecutionCounter,
    ExecutionStatistics,
    Histogram,
)
from tests.core.conftest import make_ticket

MS = 1_000_000


def numbers(statistics: ExecutionStatistics) -> dict[str, Any]:
    values = {name: getattr(statistics, name) for name in ExecutionStatistics.__slots__}
    return {name: (x.counts, x.total) if isinstance(x, Histogram) else x for name, x in values.items()}


class PlainSum:
    """The same numbers, one request after the other."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.batches: dict[int, list[int]] = {}

    def histogram(self, name: str, bounds: tuple[int, ...], value: int) -> None:
        self.counts[f"{name} {bisect_left(bounds, value)}"] += 1
        self.counts[f"{name} total"] += value

    def requests(self, succeeded: list[Ticket], times: BatchTimes) -> None:
        for ticket in succeeded:
            self.counts["rows"] += ticket.rows or 1
            self.counts["success"] += 1
            took, waited = times.end_ns - ticket.arrival_ns, times.start_ns - ticket.queued_ns
            self.counts["success ns"] += took
            self.counts["queue ns"] += waited
            for name, ns in zip(("input", "infer", "output"), times.spans, strict=True):
                self.counts[f"{name} ns"] += ns
            self.histogram("request", LATENCY_BOUNDS_US, took // 1000)
            self.histogram("queue", LATENCY_BOUNDS_US, waited // 1000)

    def execution(self, batch: list[Ticket], times: BatchTimes) -> None:
        rows = sum(ticket.rows or 1 for ticket in batch)
        self.counts["executions"] += 1
        self.batches[rows] = [a + b for a, b in zip(self.batches.get(rows, [0] * 4), (1, *times.spans), strict=True)]
        self.histogram("compute", LATENCY_BOUNDS_US, times.spans[1] // 1000)
        self.histogram("size", BATCH_BOUNDS, rows)

    def assert_equal(self, total: ExecutionStatistics) -> None:
        counts = self.counts
        assert (total.inference_count, total.execution_count) == (counts["rows"], counts["executions"])
        for duration, name in ((total.success, "success"), (total.queue, "queue"), (total.compute_input, "input"),
                               (total.compute_infer, "infer"), (total.compute_output, "output")):  # fmt: skip
            assert (duration.count, duration.ns) == (counts["success"], counts[f"{name} ns"])
        for histogram, name in ((total.request_us, "request"), (total.queue_us, "queue"),
                                (total.compute_infer_us, "compute"), (total.batch_size, "size")):  # fmt: skip
            assert histogram.counts == [counts[f"{name} {bucket}"] for bucket in range(len(histogram.counts))]
            assert histogram.total == counts[f"{name} total"]
        assert {
            size: [each.compute_infer.count, each.compute_input.ns, each.compute_infer.ns, each.compute_output.ns]
            for size, each in total.batches.items()
        } == self.batches


@pytest.mark.parametrize("seed", range(3))
def test_any_number_of_batches_adds_up_to_the_plain_sum(seed: int) -> None:
    chance, counter, plain = random.Random(seed), ExecutionCounter(), PlainSum()
    for _ in range(MOST_NOTED):
        at, spans = chance.randrange(1, 1 << 50), [chance.choice((0, 999, 1000, 1001, 2 * MS, 1 << 37)) for _ in "ios"]
        times = BatchTimes(at, at + spans[0], at + sum(spans[:2]), at + sum(spans))
        batch = [
            make_ticket(rows=chance.randrange(9), arrival_ns=at - waited - 5, queued_ns=at - waited)
            for waited in [chance.choice((0, 1, 1000, 2000, 2001, 1 << 36)) for _ in range(chance.randrange(1, 9))]
        ]
        how = chance.choice(("whole", "executed", "answered"))
        if how == "whole":
            counter.record(batch, (), times)
        elif how == "executed":
            counter.record_execution(batch, times)
        else:
            counter.record_requests(batch, (), times)
        if how != "executed":
            plain.requests(batch, times)
        if how != "answered":
            plain.execution(batch, times)
        if not chance.randrange(50):
            plain.assert_equal(counter.total())
    plain.assert_equal(counter.total())


def test_failed_and_cancelled_requests_are_counted_separately() -> None:
    counter, times = ExecutionCounter(), BatchTimes(100, 200, 300, 400)
    counter.record([], [make_ticket(arrival_ns=50), make_ticket(arrival_ns=60)], times)
    counter.record_cancelled([make_ticket(arrival_ns=70)], times)
    total = counter.total()
    assert (total.fail.count, total.fail.ns) == (2, 350 + 340)
    assert (total.cancelled.count, total.cancelled.ns) == (1, 330)
    assert (total.execution_count, total.success.count, total.last_inference_ms) == (0, 0, 0)


def test_executions_without_requests_are_added_up_in_time() -> None:
    counter = ExecutionCounter()
    for number in range(3 * MOST_NOTED):
        counter.record_execution([make_ticket(rows=1)], BatchTimes(0, 0, 1, 1))
        assert len(counter._noted[1]) <= 7 * MOST_NOTED
        assert counter.total().execution_count == number + 1


def test_a_request_alone_counts_as_a_batch_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    alone, batched = ExecutionCounter(), ExecutionCounter()
    for rows, arrival, queued, start, end in (
        (1, 0, 500, 2_000, 90_000),
        (3, 10, 10, 10, 10),
        (3, 5, 7, 11, 7_000_000),
    ):
        ticket = make_ticket(rows=rows, arrival_ns=arrival or 1, queued_ns=queued)
        alone.record_alone(ticket, start, end)
        batched.record([ticket], (), BatchTimes(start, start, end, end))
        assert numbers(alone.total()) == numbers(batched.total())
    total = alone.total()
    assert (total.execution_count, total.inference_count) == (3, 7)
    assert total.last_inference_ms == 1_700_000_000_000


def test_reader_never_sees_counts_fall_while_another_thread_counts() -> None:
    counter, ended = ExecutionCounter(), threading.Event()
    batch, times = [make_ticket(rows=2, arrival_ns=1, queued_ns=2) for _ in range(3)], BatchTimes(10, 20, 30, 40)

    def count() -> None:
        for _ in range(4 * MOST_NOTED):
            counter.record(batch, (), times)
        ended.set()

    thread = threading.Thread(target=count)
    thread.start()
    seen = 0
    while not ended.is_set():
        total = counter.total()
        assert total.success.count >= seen
        assert total.inference_count == 2 * total.success.count == 6 * total.execution_count
        assert sum(total.request_us.counts) == total.success.count
        seen = total.success.count
    thread.join()
    assert counter.total().success.count == 12 * MOST_NOTED
