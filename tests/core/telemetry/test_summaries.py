from __future__ import annotations

import gc
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import BatchTimes
from headrace.telemetry.statistics import ModelStatistics
from headrace.telemetry.summaries import RELATIVE_ERROR, WINDOW_S, LatencySummaries, Summaries, Summary
from tests.core.conftest import make_ticket

SECOND = 1_000_000_000
QUANTILES = (0.5, 0.9, 0.99)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=300))
def test_quantiles_are_within_the_stated_error_of_the_sorted_samples(durations_us: list[int]) -> None:
    summary = Summary()
    for us in durations_us:
        summary.record(us, 0)
    exact = np.quantile(durations_us, QUANTILES, method="inverted_cdf")
    for quantile, truth in zip(summary.quantiles(QUANTILES, 0), exact, strict=True):
        assert abs(quantile - truth) <= truth * RELATIVE_ERROR * 1.0001 + 0.5  # whole microseconds


def test_count_and_sum_are_exact_and_weighted() -> None:
    summary = Summary()
    summary.record(10, 0, times=3)
    summary.record(7, 0)
    assert (summary.count, summary.total_us) == (4, 37)


def test_quantiles_cover_the_window_but_count_and_sum_everything() -> None:
    summary = Summary()
    summary.record(1000, 0)
    summary.record(10, WINDOW_S * SECOND)
    assert summary.quantiles([1.0], WINDOW_S * SECOND) == [10]
    assert (summary.count, summary.total_us) == (2, 1010)
    assert math.isnan(summary.quantiles([0.5], 3 * WINDOW_S * SECOND)[0])


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    summary = Summary()
    for us in range(200_000):
        summary.record(us, us * SECOND // 1000)
    assert sum(len(slot) for slot in summary._slots) < 6 * 700  # log(200,000) / log(1.02) is 616


@pytest.mark.parametrize(
    ("stage", "count", "total"),
    [
        ("request", 2, 265 + 165),
        ("queue", 2, 190 + 80),
        ("compute_input", 2, 2 * 10),
        ("compute_infer", 2, 2 * 50),
        ("compute_output", 2, 2 * 5),
    ],
)
def test_a_batch_counts_once_for_each_request_that_succeeded(stage: str, count: int, total: int) -> None:
    summaries = LatencySummaries(clock_ns=lambda: 365_000)
    times = BatchTimes(300_000, 310_000, 360_000, 365_000)
    summaries.batch_finished([ticket(100, 110), ticket(200, 220)], [ticket(1, 2)], times)
    assert summaries.read(stage, [])[:2] == (count, total)


def test_a_batch_of_failures_is_not_counted() -> None:
    summaries = LatencySummaries(clock_ns=lambda: 4)
    summaries.batch_finished([], [ticket(0, 0)], BatchTimes(1, 2, 3, 4))
    assert summaries.read("compute_infer", []) == (0, 0, [])


def test_summaries_live_as_long_as_their_model() -> None:
    class Model:
        statistics = ModelStatistics()

    summaries, model = Summaries(), Model()
    observer = summaries.observe_model(model)
    assert summaries.of(model) is observer
    del model
    gc.collect()
    assert len(summaries._models) == 0


def ticket(arrival_us: int, queued_us: int) -> Ticket:
    ticket = make_ticket(arrival_ns=arrival_us * 1000)
    ticket.queued_ns = queued_us * 1000
    return ticket
