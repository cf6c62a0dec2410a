"""The metrics of the served models, read from their statistics at scrape time.

Names and help texts are Triton's (docs/spec/behaviours.md section 7).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol, TypeAlias

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.config.model_config_pb2 import ModelConfig
from headrace.telemetry.executions import BATCH_BOUNDS, LATENCY_BOUNDS_US, Histogram
from headrace.telemetry.exposition import MetricsSettings, number
from headrace.telemetry.first_responses import FIRST_RESPONSE_HELP, FIRST_RESPONSE_NAME, FirstResponseTimes
from headrace.telemetry.log_output import LogOutput
from headrace.telemetry.statistics import Snapshot
from headrace.telemetry.summaries import Summaries


class Family(NamedTuple):
    """A metric family with one sample per model version."""

    name: str
    help: str
    value: Callable[[Snapshot], float]
    kind: Literal["counter", "gauge"] = "counter"


class HistogramFamily(NamedTuple):
    """A metric family with one histogram per model version; ``bounds`` are the upper bounds without +Inf."""

    name: str
    help: str
    value: Callable[[Snapshot], Histogram]
    bounds: tuple[int, ...]


FAILURE = ("nv_inference_request_failure", "Number of failed inference requests, all batch sizes")
#: The values of the label ``reason``. Each has a series as soon as the model is loaded.
REASONS: tuple[tuple[str, Callable[[Snapshot], float]], ...] = (
    ("REJECTED", lambda s: s.rejected.count),
    ("CANCELED", lambda s: s.cancelled.count),
    ("BACKEND", lambda s: s.backend_failures.count),
    ("OTHER", lambda s: s.other_failures.count),
)
#: The families of every model, but for failures, which have a label more.
FAMILIES: tuple[Family, ...] = (
    Family(
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda s: s.success.count,
    ),
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
    Family(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda s: s.pending,
        "gauge",
    ),
    Family("nv_model_load_duration_secs", "Model load time in seconds", lambda s: s.load_ns / 1e9, "gauge"),
    # Metrics of Headrace only.
    Family(
        "nv_model_instance_restart_count",
        "Number of times that an instance was started again after its process had ended",
        lambda s: s.restarts,
    ),
    Family(
        "nv_model_instances_on_event_loop",
        "Number of instances whose executions run on the server's event loop",
        lambda s: s.on_loop,
        "gauge",
    ),
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
#: Metrics of models with a response cache.
CACHE: tuple[Family, ...] = (
    Family("nv_cache_num_hits_per_model", "Number of cache hits per model", lambda s: s.cache_hit.count),
    Family("nv_cache_num_misses_per_model", "Number of cache misses per model", lambda s: s.cache_miss.count),
    Family(
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda s: s.cache_hit.ns // 1000,
    ),
    Family(
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda s: s.cache_miss.ns // 1000,
    ),
    # A metric of Headrace only.
    Family(
        "nv_cache_num_failures_per_model",
        "Number of times that the response cache failed to answer, or to keep an answer, per model",
        lambda s: s.cache_failures,
    ),
)
#: Metrics of Headrace only: distributions, which the averages of counters do not show.
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
#: Name and help text of each of `headrace.telemetry.summaries.STAGES`. The texts are Triton's.
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
    "cache_hit": (
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit counts/durations per model, in microseconds.",
    ),
    "cache_miss": (
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss counts/durations per model, in microseconds.",
    ),
}


Labels: TypeAlias = dict[str, str]


class CollectedModel(Protocol):
    """The part of `headrace.models.served.ServedModel` that this module uses."""

    name: str
    version: int
    config: ModelConfig

    def snapshot(self) -> Snapshot: ...


class ModelCollector(Collector):
    """The families of docs/spec/behaviours.md sections 7.1 and 7.3, and Headrace's histograms.

    ``served`` returns the models that have series. An unloaded model has none at the next scrape.
    """

    def __init__(
        self,
        served: Callable[[], Iterable[CollectedModel]],
        settings: MetricsSettings,
        summaries: Summaries | None = None,
        shows: Callable[[str], bool] = bool,
    ) -> None:
        """Create the collector. ``shows`` is true for the names of families that are collected."""
        self._served, self._settings, self._summaries, self._shows = served, settings, summaries, shows
        latencies = LATENCIES if settings.counter_latencies else ()
        self._counted = [family for family in (*FAMILIES, *latencies) if shows(family.name)]
        self._cached = [family for family in CACHE if shows(family.name)]
        self._histograms = [family for family in HISTOGRAMS if settings.histograms and shows(family.name)]

    def collect(self) -> Iterator[Metric]:
        """Return an iterator over the families. The statistics are read here, on the event loop.

        Any thread may iterate.
        """
        return self._families([(model, labels_of(model), model.snapshot()) for model in self._served()])

    def _families(self, models: Sequence[tuple[CollectedModel, Labels, Snapshot]]) -> Iterator[Metric]:
        rows = [(labels, snapshot) for _, labels, snapshot in models]
        for family in self._counted:
            yield _family(family, rows)
        if self._shows(FAILURE[0]):
            yield _failures(rows)
        cached = [(labels, snapshot) for labels, snapshot in rows if snapshot.has_cache]
        for family in self._cached:
            yield _family(family, cached)
        for histogram in self._histograms:
            yield _histogram(
                histogram.name,
                histogram.help,
                [(labels, histogram.bounds, histogram.value(snapshot)) for labels, snapshot in rows],
            )
        if self._settings.histogram_latencies and self._shows(FIRST_RESPONSE_NAME):
            decoupled = [
                (labels, snapshot.responses.first.bounds, snapshot.responses.first)
                for model, labels, snapshot in models
                if model.config.model_transaction_policy.decoupled
            ]
            yield _histogram(FIRST_RESPONSE_NAME, FIRST_RESPONSE_HELP, decoupled)
        yield from self._summary_families(models)

    def _summary_families(self, models: Sequence[tuple[CollectedModel, Labels, Snapshot]]) -> Iterator[Metric]:
        for stage, (name, help_text) in SUMMARIES.items() if self._summaries is not None else ():
            if not self._shows(name):
                continue
            family = Metric(name, help_text, "summary")
            for model, labels, snapshot in models:
                if stage not in (("cache_hit", "cache_miss"), ("request",))[snapshot.has_cache]:
                    family.samples += self._summary(name, stage, model, labels)
            yield family

    def _summary(self, name: str, stage: str, model: CollectedModel, labels: Labels) -> Iterator[Sample]:
        assert self._summaries is not None
        quantiles = self._settings.quantiles
        count, total, values = self._summaries.of(model).read(stage, quantiles)
        yield Sample(f"{name}_count", labels, count)
        yield Sample(f"{name}_sum", labels, total)
        for quantile, value in zip(quantiles, values, strict=True):
            yield Sample(name, {**labels, "quantile": number(quantile)}, value)


def labels_of(model: CollectedModel) -> Labels:
    """Return the labels of ``model``: model, version and the config's ``metric_tags``, sorted by name."""
    tags = {_tag_label(tag): value for tag, value in model.config.metric_tags.items()}
    return dict(sorted({**tags, "model": model.name, "version": str(model.version)}.items()))


def _tag_label(tag: str) -> str:
    """Return ``_tag``, with each invalid character replaced by "_": one bad tag must not make the page invalid."""
    return "_" + re.sub(r"[^a-zA-Z0-9_]", "_", tag)


def _family(family: Family, rows: Iterable[tuple[Labels, Snapshot]]) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    metric.samples += (Sample(family.name, labels, family.value(snapshot)) for labels, snapshot in rows)
    return metric


def lost_lines() -> Metric:
    """Return the counter of lost log lines: if the disk is full, the log cannot report them. Headrace only."""
    name = "headrace_log_lines_lost"
    metric = Metric(name, "Number of lines of the log that could not be written", "counter")
    metric.samples.append(Sample(name, {}, LogOutput.lost))
    return metric


def _failures(rows: Iterable[tuple[Labels, Snapshot]]) -> Metric:
    name, help_text = FAILURE
    metric = Metric(name, help_text, "counter")
    for labels, snapshot in rows:
        for reason, count in REASONS:
            ordered = dict(sorted({**labels, "reason": reason}.items()))
            metric.samples.append(Sample(name, ordered, count(snapshot)))
    return metric


def _histogram(
    name: str, help_text: str, rows: Iterable[tuple[Labels, Sequence[float], Histogram | FirstResponseTimes]]
) -> Metric:
    """Return the family of ``rows``: the labels, the upper bounds and the counts of each model version."""
    metric = Metric(name, help_text, "histogram")
    for labels, bounds, histogram in rows:
        counts = list(accumulate(histogram.counts))
        metric.samples.append(Sample(f"{name}_count", labels, counts[-1]))
        metric.samples.append(Sample(f"{name}_sum", labels, histogram.total))
        for bound, count in zip((*map(number, bounds), "+Inf"), counts, strict=True):
            metric.samples.append(Sample(f"{name}_bucket", {**labels, "le": bound}, count))
    return metric
