"""Histogram of the time to the first response of decoupled models, for ``--metrics-config=histogram_latencies=true``
(docs/spec/behaviours.md section 7.3)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from headrace.config.model_config_pb2 import ModelConfig

FIRST_RESPONSE_NAME = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_HELP = "Duration from request to first response in milliseconds"
DEFAULT_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)


class FirstResponseTimes:
    """The histogram of one model version, in whole milliseconds. Written on the event loop, read by any thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds_ms: Sequence[float] = DEFAULT_BOUNDS_MS) -> None:
        self.bounds = bounds_ms
        self.counts = [0] * (len(bounds_ms) + 1)
        self.total = 0

    def record(self, took_ns: int) -> None:
        """Count a first response that was given ``took_ns`` after its request had arrived."""
        ms = took_ns // 1_000_000
        self.counts[bisect_left(self.bounds, ms)] += 1
        self.total += ms


def bounds_of(config: ModelConfig) -> Sequence[float]:
    """Return the upper bounds that ``model_metrics`` of ``config`` sets for the histogram; by default Triton's."""
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE_NAME:
            return tuple(control.histogram_options.buckets)
    return DEFAULT_BOUNDS_MS
