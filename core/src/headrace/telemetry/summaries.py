"""Quantiles of the last minute, for ``--metrics-config summary_latencies=true`` (docs/spec/behaviours.md section 7.3).

Durations are counted in logarithmic buckets, each `GROWTH` times as wide as the one below it. So a
quantile differs from the true value by `RELATIVE_ERROR` at most, whatever the value. A summary stores
one integer per bucket, about 2,200 at most, and summaries merge by addition. (Triton's estimator
stores samples and bounds the error in rank.) As in Triton, quantiles are those of the last `WINDOW_S`
seconds, and count and sum begin at the load of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, isnan, log, nan
from threading import Lock
from time import monotonic_ns
from typing import Protocol
from weakref import WeakKeyDictionary

import pluggy

from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import BatchTimes, Observer
from headrace.telemetry.statistics import ModelStatistics

hookimpl = pluggy.HookimplMarker("headrace")

GROWTH = 1.02
RELATIVE_ERROR = (GROWTH - 1) / (GROWTH + 1)
WINDOW_S = 60
SLOTS = 6
#: In the order of their export. They are parts of the names of the families.
STAGES = ("request", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")

_LOG_GROWTH = log(GROWTH)
_SLOT_NS = WINDOW_S * 1_000_000_000 // SLOTS


class Summary:
    """Count, sum and quantiles of one kind of duration, in microseconds. Not thread-safe."""

    __slots__ = ("_slots", "_started", "count", "total_us")

    def __init__(self) -> None:
        self.count = 0
        self.total_us = 0
        self._slots: list[Counter[int]] = [Counter() for _ in range(SLOTS)]
        self._started = [0] * SLOTS

    def record(self, us: int, now_ns: int, times: int = 1) -> None:
        """Count a duration of ``us`` microseconds ``times`` times, at ``now_ns``."""
        self.count += times
        self.total_us += us * times
        self._slot(now_ns)[ceil(log(us) / _LOG_GROWTH) if us > 0 else -1] += times

    def quantiles(self, requested: Sequence[float], now_ns: int) -> list[float]:
        """Return one value in microseconds for each of ``requested``; NaN if nothing was counted in the last minute."""
        merged: Counter[int] = Counter()
        for slot, started in zip(self._slots, self._started, strict=True):
            if now_ns // _SLOT_NS - started < SLOTS:
                merged.update(slot)
        buckets = sorted(merged.items())
        return [_value(buckets, quantile, merged.total()) for quantile in requested]

    def _slot(self, now_ns: int) -> Counter[int]:
        """Return the buckets of the current 10 s. They replace the buckets of a minute ago."""
        started = now_ns // _SLOT_NS
        place = started % SLOTS
        if self._started[place] != started:
            self._started[place] = started
            self._slots[place] = Counter()
        return self._slots[place]


def _value(buckets: Sequence[tuple[int, int]], quantile: float, total: int) -> float:
    """Return the middle of the bucket in which the sample of rank ``quantile * total`` lies.

    A quantile below 0 counts as 0, and one above 1 as 1; NaN has no value.
    """
    if isnan(quantile):
        return nan
    rank = max(1, ceil(min(max(quantile, 0), 1) * total))
    for index, count in buckets:
        rank -= count
        if rank <= 0:
            return round(2 * GROWTH**index / (GROWTH + 1)) if index >= 0 else 0
    return nan


class LatencySummaries(Observer):
    """The summaries of one model version, one for each of `STAGES`. It locks once per batch."""

    def __init__(self, clock_ns: Callable[[], int] = monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = Lock()
        self._stages = {stage: Summary() for stage in STAGES}

    def batch_finished(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        start, inputs, inferred, end = times.start_ns, times.input_end_ns, times.infer_end_ns, times.end_ns
        stages, number = self._stages, len(succeeded)
        if not number:
            return
        with self._lock:
            for ticket in succeeded:
                stages["request"].record((end - ticket.arrival_ns) // 1000, end)
                stages["queue"].record((start - ticket.queued_ns) // 1000, end)
            stages["compute_input"].record((inputs - start) // 1000, end, number)
            stages["compute_infer"].record((inferred - inputs) // 1000, end, number)
            stages["compute_output"].record((end - inferred) // 1000, end, number)

    def cache_looked_up(self, is_hit: bool, took_ns: int) -> None:
        """Count a lookup in the response cache that took ``took_ns``."""
        with self._lock:
            self._stages["cache_hit" if is_hit else "cache_miss"].record(took_ns // 1000, self._clock_ns())

    def read(self, stage: str, quantiles: Sequence[float]) -> tuple[int, int, list[float]]:
        """Return count, sum in microseconds, and ``quantiles`` of one of `STAGES`."""
        with self._lock:
            summary = self._stages[stage]
            return summary.count, summary.total_us, summary.quantiles(quantiles, self._clock_ns())


class ObservedModel(Protocol):
    """The part of `headrace.models.served.ServedModel` that this module uses."""

    statistics: ModelStatistics


class Summaries:
    """The summaries of all models, as a plugin of the server. A model's summaries are removed with it."""

    def __init__(self) -> None:
        self._models: WeakKeyDictionary[object, LatencySummaries] = WeakKeyDictionary()

    @hookimpl
    def observe_model(self, model: ObservedModel) -> LatencySummaries:
        summaries = self.of(model)
        if model.statistics.has_cache:
            model.statistics.watch_cache = summaries.cache_looked_up
        return summaries

    def of(self, model: object) -> LatencySummaries:
        """Return the summaries of ``model``; new, empty ones if it has none yet."""
        return self._models.setdefault(model, LatencySummaries())
