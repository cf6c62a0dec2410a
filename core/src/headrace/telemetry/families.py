"""The per-model families: names and help texts of Triton (docs/spec/behaviours.md section 7), and what they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace.telemetry.statistics import BATCH_BOUNDS, LATENCY_BOUNDS_US, Histogram, Snapshot


class Family(NamedTuple):
    """A family of one sample per model version."""

    name: str
    help: str
    value: Callable[[Snapshot], float]


class HistogramFamily(NamedTuple):
    """A histogram per model version; ``bounds`` are the upper bounds, +Inf left out."""

    name: str
    help: str
    value: Callable[[Snapshot], Histogram]
    bounds: tuple[int, ...]


SUCCESS = Family(
    "nv_inference_request_success",
    "Number of successful inference requests, all batch sizes",
    lambda s: s.success.count,
)
FAILURE = ("nv_inference_request_failure", "Number of failed inference requests, all batch sizes")
#: The values of the label ``reason``; each has its series from the load on.
REASONS: tuple[tuple[str, Callable[[Snapshot], float]], ...] = (
    ("REJECTED", lambda s: s.rejected.count),
    ("CANCELED", lambda s: s.cancelled.count),
    ("BACKEND", lambda s: s.backend_failures.count),
    ("OTHER", lambda s: s.other_failures.count),
)
COUNTS: tuple[Family, ...] = (
    Family(
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda s: s.executions.inference_count,
    ),
    Family(
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda s: s.executions.execution_count,
    ),
)
#: Headrace's own: Triton has no restarts to count.
RESTARTS = Family(
    "nv_model_instance_restart_count",
    "Number of times that an instance was started again after its process had ended",
    lambda s: s.restarts,
)
LATENCIES: tuple[Family, ...] = (
    Family(
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda s: s.success.ns // 1000,
    ),
    Family(
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda s: s.executions.queue.ns // 1000,
    ),
    Family(
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda s: s.executions.compute_input.ns // 1000,
    ),
    Family(
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda s: s.executions.compute_infer.ns // 1000,
    ),
    Family(
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda s: s.executions.compute_output.ns // 1000,
    ),
)
GAUGES: tuple[Family, ...] = (
    Family(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda s: s.pending,
    ),
    Family("nv_model_load_duration_secs", "Model load time in seconds", lambda s: s.load_ns / 1e9),
)
#: Headrace's own: what averages of counters cannot tell.
HISTOGRAMS: tuple[HistogramFamily, ...] = (
    HistogramFamily(
        "nv_inference_request_histogram_us",
        "Histogram of inference request duration in microseconds (does not include cached requests)",
        lambda s: s.executions.request_us,
        LATENCY_BOUNDS_US,
    ),
    HistogramFamily(
        "nv_inference_queue_histogram_us",
        "Histogram of inference queuing duration in microseconds (does not include cached requests)",
        lambda s: s.executions.queue_us,
        LATENCY_BOUNDS_US,
    ),
    HistogramFamily(
        "nv_inference_compute_infer_histogram_us",
        "Histogram of compute inference duration in microseconds, per model execution",
        lambda s: s.executions.compute_infer_us,
        LATENCY_BOUNDS_US,
    ),
    HistogramFamily(
        "nv_inference_batch_size_histogram",
        "Histogram of the rows that one model execution ran together",
        lambda s: s.executions.batch_size,
        BATCH_BOUNDS,
    ),
)
_INPUT, _INFER, _OUTPUT = LATENCIES[2:]
#: Stage (of `headrace.telemetry.summaries`) to name and help text. Triton's texts, "Cumulative" included.
SUMMARIES: Mapping[str, tuple[str, str]] = {
    "request": (
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
    ),
    "queue": (
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
    ),
    "compute_input": ("nv_inference_compute_input_summary_us", _INPUT.help),
    "compute_infer": ("nv_inference_compute_infer_summary_us", _INFER.help),
    "compute_output": ("nv_inference_compute_output_summary_us", _OUTPUT.help),
}
