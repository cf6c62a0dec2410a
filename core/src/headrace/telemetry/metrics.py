"""The metrics of the served models, read from their statistics at scrape time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol, TypeAlias

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.config.model_config_pb2 import ModelConfig
from headrace.telemetry import families
from headrace.telemetry.families import Family, HistogramFamily
from headrace.telemetry.metrics_settings import MetricsSettings
from headrace.telemetry.statistics import Snapshot
from headrace.telemetry.summaries import Summaries

Labels: TypeAlias = dict[str, str]


class Measured(Protocol):
    """What is needed of a `headrace.models.served.ServedModel`."""

    name: str
    version: int
    config: ModelConfig

    def snapshot(self) -> Snapshot: ...


class ModelCollector(Collector):
    """The families of docs/spec/behaviours.md sections 7.1 and 7.3, and Headrace's histograms.

    ``served`` gives the models that have series: one that is unloaded is gone from the next scrape.
    """

    def __init__(
        self, served: Callable[[], Iterable[Measured]], settings: MetricsSettings, summaries: Summaries | None = None
    ) -> None:
        self._served, self._settings, self._summaries = served, settings, summaries

    def collect(self) -> Iterator[Metric]:
        models = [(model, _labels(model), model.snapshot()) for model in self._served()]
        rows = [(labels, snapshot) for _, labels, snapshot in models]
        yield _family(families.SUCCESS, "counter", rows)
        yield _failures(rows)
        for family in families.COUNTS:
            yield _family(family, "counter", rows)
        for family in families.LATENCIES if self._settings.counter_latencies else ():
            yield _family(family, "counter", rows)
        for family in families.GAUGES:
            yield _family(family, "gauge", rows)
        yield _family(families.RESTARTS, "counter", rows)
        for histogram in families.HISTOGRAMS:
            yield _histogram(histogram, rows)
        yield from self._summary_families([(model, labels) for model, labels, _ in models])

    def _summary_families(self, models: Sequence[tuple[Measured, Labels]]) -> Iterator[Metric]:
        if self._summaries is None:
            return
        for stage, (name, help_text) in families.SUMMARIES.items():
            family = Metric(name, help_text, "summary")
            for model, labels in models:
                family.samples += self._summary(name, stage, model, labels)
            yield family

    def _summary(self, name: str, stage: str, model: Measured, labels: Labels) -> Iterator[Sample]:
        assert self._summaries is not None
        wanted = self._settings.quantiles
        count, total, values = self._summaries.of(model).read(stage, wanted)
        yield Sample(f"{name}_count", labels, count)
        yield Sample(f"{name}_sum", labels, total)
        for quantile, value in zip(wanted, values, strict=True):
            yield Sample(name, {**labels, "quantile": format(quantile, "g")}, value)


def _labels(model: Measured) -> Labels:
    """Model, version and the config's ``metric_tags``, in order of the names."""
    tags = {_tag_label(tag): value for tag, value in model.config.metric_tags.items()}
    return dict(sorted({**tags, "model": model.name, "version": str(model.version)}.items()))


def _tag_label(tag: str) -> str:
    """``_tag``, with what a label name may not hold replaced: one bad tag must not spoil the page."""
    return "_" + re.sub(r"[^a-zA-Z0-9_]", "_", tag)


def _family(family: Family, kind: str, rows: Iterable[tuple[Labels, Snapshot]]) -> Metric:
    metric = Metric(family.name, family.help, kind)
    metric.samples += (Sample(family.name, labels, family.value(snapshot)) for labels, snapshot in rows)
    return metric


def _failures(rows: Iterable[tuple[Labels, Snapshot]]) -> Metric:
    name, help_text = families.FAILURE
    metric = Metric(name, help_text, "counter")
    for labels, snapshot in rows:
        for reason, count in families.REASONS:
            ordered = dict(sorted({**labels, "reason": reason}.items()))
            metric.samples.append(Sample(name, ordered, count(snapshot)))
    return metric


def _histogram(family: HistogramFamily, rows: Iterable[tuple[Labels, Snapshot]]) -> Metric:
    metric = Metric(family.name, family.help, "histogram")
    bounds = [*map(str, family.bounds), "+Inf"]
    for labels, snapshot in rows:
        histogram = family.value(snapshot)
        counts = list(accumulate(histogram.counts))
        metric.samples.append(Sample(f"{family.name}_count", labels, counts[-1]))
        metric.samples.append(Sample(f"{family.name}_sum", labels, histogram.total))
        for bound, count in zip(bounds, counts, strict=True):
            metric.samples.append(Sample(f"{family.name}_bucket", {**labels, "le": bound}, count))
    return metric
