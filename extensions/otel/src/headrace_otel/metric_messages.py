"""Messages of OTLP for the families of the metrics page.

Names, labels and values are those of the page, so that both can be compared. Counters and histograms are cumulative.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from prometheus_client import Metric
from prometheus_client.samples import Sample

from headrace_otel.log_messages import attribute

#: The series of a message; a histogram counts as eight. It is then below 2 MiB, and collectors accept 4 MiB.
_AT_ONCE: Final = 8000
_HISTOGRAM_WEIGHT: Final = 8
_CUMULATIVE = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
_UNITS = {"us": "us", "ms": "ms", "secs": "s", "bytes": "By"}


class SeriesStarts:
    """The start time of each cumulative series: a reloaded model counts from zero."""

    def __init__(self, start_ns: int) -> None:
        self._before_ns = self._now_ns = start_ns
        self._last: dict[tuple[str, ...], tuple[float, int]] = {}
        self._found: dict[tuple[str, ...], tuple[float, int]] = {}

    def next(self, now_ns: int) -> None:
        """Start a collection. Series that were not in the last one are removed."""
        self._before_ns, self._now_ns = self._now_ns, now_ns
        self._last, self._found = self._found, {}

    def of(self, sample: Sample) -> int:
        """Return the start of the series of ``sample``, a value that never falls while the series lives."""
        key = (sample.name, *sample.labels.values())
        value, start = self._last.get(key, (0.0, self._before_ns))
        if sample.value < value:
            start = self._before_ns
        self._found[key] = sample.value, start
        return start


class MetricMessages:
    """Makes the messages of one process. One thread."""

    def __init__(self, resource: Resource, start_ns: int, is_exponential: bool) -> None:
        self._resource, self._is_exponential = resource, is_exponential
        self._starts = SeriesStarts(start_ns)
        self._attributes: dict[tuple[tuple[str, str], ...], list[KeyValue]] = {}

    def write(self, families: Iterable[Metric], now_ns: int) -> Iterator[bytes]:
        """Yield messages with all series of ``families``, which were read at ``now_ns`` since 1970."""
        self._starts.next(now_ns)
        self._attributes.clear()
        self._now_ns = now_ns
        request, weight = self._begin(), 0
        for family in families:
            series = _series(family) if family.type in ("histogram", "summary") else [[each] for each in family.samples]
            while series:
                room = _AT_ONCE - weight
                each_weighs = _HISTOGRAM_WEIGHT if family.type == "histogram" else 1
                count = max(room // each_weighs, 1)
                self._add(request, family, series[:count])
                weight += min(count, len(series)) * each_weighs
                series = series[count:]
                if weight >= _AT_ONCE or (series and _AT_ONCE - weight < each_weighs):
                    yield request.SerializeToString()
                    request, weight = self._begin(), 0
        if weight:
            yield request.SerializeToString()

    def _begin(self) -> ExportMetricsServiceRequest:
        request = ExportMetricsServiceRequest()
        metrics = request.resource_metrics.add()
        metrics.resource.CopyFrom(self._resource)
        metrics.scope_metrics.add().scope.name = "headrace"
        return request

    def _add(self, request: ExportMetricsServiceRequest, family: Metric, series: Sequence[Sequence[Sample]]) -> None:
        metric = (
            request.resource_metrics[0]
            .scope_metrics[0]
            .metrics.add(
                name=family.name, description=family.documentation, unit=_UNITS.get(family.name.rpartition("_")[2], "")
            )
        )
        if family.type == "histogram":
            for samples in series:
                self._add_histogram(metric, samples)
        elif family.type == "summary":
            for samples in series:
                self._add_summary(metric.summary, samples)
        else:
            is_counter = family.type == "counter"
            if is_counter:
                metric.sum.aggregation_temporality, metric.sum.is_monotonic = _CUMULATIVE, True
            points = metric.sum.data_points if is_counter else metric.gauge.data_points
            for (sample,) in series:
                point = points.add(time_unix_nano=self._now_ns, attributes=self._of(sample.labels))
                if is_counter:
                    point.start_time_unix_nano = self._starts.of(sample)
                if isinstance(sample.value, int) and abs(sample.value) < 1 << 63:
                    point.as_int = sample.value
                else:
                    point.as_double = sample.value

    def _add_histogram(self, metric: metrics_pb2.Metric, samples: Sequence[Sample]) -> None:
        count, total = samples[:2]
        bounds = [float(each.labels["le"]) for each in samples[2:-1]]
        below = [0, *(int(each.value) for each in samples[2:])]
        counts = [upper - lower for lower, upper in pairwise(below)]
        start, attributes = self._starts.of(count), self._of(count.labels)
        if self._is_exponential and bounds[:2] == [1, 2] and bounds == [2.0**power for power in range(len(bounds))]:
            metric.exponential_histogram.aggregation_temporality = _CUMULATIVE
            point = metric.exponential_histogram.data_points.add(attributes=attributes, scale=0)
            used = [index for index, each in enumerate(counts) if each]
            if used:  # bucket n has the values above 2**n up to 2**(n+1)
                point.positive.offset = used[0] - 1
                point.positive.bucket_counts.extend(counts[used[0] : used[-1] + 1])
            point.count, point.sum = int(count.value), total.value
            point.start_time_unix_nano, point.time_unix_nano = start, self._now_ns
            return
        metric.histogram.aggregation_temporality = _CUMULATIVE
        metric.histogram.data_points.add(
            attributes=attributes, start_time_unix_nano=start, time_unix_nano=self._now_ns,
            count=int(count.value), sum=total.value, explicit_bounds=bounds, bucket_counts=counts,
        )  # fmt: skip

    def _add_summary(self, summary: metrics_pb2.Summary, samples: Sequence[Sample]) -> None:
        count, total = samples[:2]
        point = summary.data_points.add(
            attributes=self._of(count.labels), start_time_unix_nano=self._starts.of(count),
            time_unix_nano=self._now_ns, count=int(count.value), sum=total.value,
        )  # fmt: skip
        for each in samples[2:]:
            point.quantile_values.add(quantile=float(each.labels["quantile"]), value=each.value)

    def _of(self, labels: Mapping[str, str]) -> list[KeyValue]:
        key = tuple(labels.items())
        made = self._attributes.get(key)
        if made is None:
            made = self._attributes[key] = [attribute(name, value) for name, value in key]
        return made


def _series(family: Metric) -> list[list[Sample]]:
    """Return the samples of each series of a histogram or a summary: the page has count and sum first."""
    found: list[list[Sample]] = []
    for sample in family.samples:
        if sample.name == f"{family.name}_count":
            found.append([])
        found[-1].append(sample)
    return found
