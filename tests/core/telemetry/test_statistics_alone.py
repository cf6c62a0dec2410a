"""A request that is recorded alone counts as one that is recorded in a batch of one."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headrace.telemetry.statistics import BatchTimes, ExecutionStatistics, Histogram
from tests.core.conftest import make_ticket


def numbers(statistics: ExecutionStatistics) -> dict[str, Any]:
    found = {name: getattr(statistics, name) for name in ExecutionStatistics.__slots__}
    return {name: (x.counts, x.total) if isinstance(x, Histogram) else x for name, x in found.items()}


def test_a_request_alone_counts_as_a_batch_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    alone, batched = ExecutionStatistics(), ExecutionStatistics()
    for rows, arrival, queued, start, end in (
        (1, 0, 500, 2_000, 90_000),
        (3, 10, 10, 10, 10),
        (3, 5, 7, 11, 7_000_000),
    ):
        ticket = make_ticket(rows=rows, arrival_ns=arrival or 1, queued_ns=queued)
        alone.record_alone(ticket, start, end)
        batched.record([ticket], (), BatchTimes(start, start, end, end))
        assert numbers(alone) == numbers(batched)
    assert (alone.execution_count, alone.inference_count) == (3, 7)
