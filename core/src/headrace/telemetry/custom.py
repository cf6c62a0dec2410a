"""Metrics that models make (docs/spec/behaviours.md section 7.6). Any thread.

Instances that name the same family and the same labels share one metric. It is on the page until the
last instance that uses it releases it. An instance that ends releases all of its metrics.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.errors import AlreadyExists, InternalError
from headrace.telemetry.exposition import number
from headrace.telemetry.series import (
    MetricKind,
    MetricOperation,
    check_buckets,
    check_family_name,
    check_labels,
    check_metric_update,
    metric_without_value,
)


class CustomMetric:
    """A counter, gauge or histogram of prometheus-client, with ``labels`` sorted by name. Any thread.

    ``holders`` is the number of its uses by instances.
    """

    __slots__ = ("_kind", "_metric", "_sum", "holders", "labels")

    def __init__(self, family: CustomFamily, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        """``bounds`` are the upper bounds of a histogram. The library needs one besides +Inf: without any, it is 0."""
        self._kind, self.labels, self.holders = family.kind, dict(sorted(labels.items())), 0
        about = family.name, family.description, tuple(self.labels)
        made: Counter | Gauge | Histogram
        if self._kind == "histogram":
            made = Histogram(*about, registry=None, buckets=bounds or (0.0,))
            # The library has no sum if a bound is negative. Triton has.
            self._sum = Gauge("sum", "", registry=None)
        else:
            made = (Counter if self._kind == "counter" else Gauge)(*about, registry=None)
        self._metric = made.labels(*self.labels.values()) if labels else made

    def update(self, operation: MetricOperation, value: float, times: int = 1) -> None:
        """Apply ``operation`` with ``value``, ``times`` times, or raise as `check_metric_update` does."""
        check_metric_update(self._kind, operation, value)
        change = getattr(self._metric, "inc" if operation == "increment" else operation)
        for _ in range(times):
            change(value)
            if operation == "observe":
                self._sum.inc(value)

    def value(self) -> float:
        """Return the value. Raises `Unsupported` for a histogram."""
        if self._kind == "histogram":
            raise metric_without_value(self._kind)
        return _samples(self._metric)[0].value

    def samples(self, family: str) -> Iterator[Sample]:
        """Yield the lines of the page as Triton has them: no ``_total`` behind a counter, no ``.0`` in a bound."""
        if self._kind != "histogram":
            yield Sample(family, self.labels, self.value())
            return
        buckets = [sample for sample in _samples(self._metric) if sample.name == f"{family}_bucket"]
        yield Sample(f"{family}_count", self.labels, buckets[-1].value)
        yield Sample(f"{family}_sum", self.labels, _samples(self._sum)[0].value)
        for bucket in buckets:
            yield Sample(bucket.name, {**self.labels, "le": number(float(bucket.labels["le"]))}, bucket.value)


def _samples(metric: Collector) -> list[Sample]:
    return [sample for family in metric.collect() for sample in family.samples]


@dataclass(slots=True, eq=False)
class CustomFamily(Collector):
    """A metric family made by models. ``holders`` is the number of uses: by instances, and by its metrics."""

    name: str
    description: str
    kind: MetricKind
    holders: int = 0
    metrics: dict[tuple[tuple[str, str], ...], CustomMetric] = field(default_factory=dict)

    def describe(self) -> list[Metric]:
        """Return a family with the sample names of this one, for the registry. A counter has no ``_total`` here."""
        return [Metric(self.name, self.description, "gauge" if self.kind == "counter" else self.kind)]

    def collect(self) -> list[Metric]:
        family = Metric(self.name, self.description, self.kind)
        for metric in self.metrics.values():
            family.samples += metric.samples(self.name)
        return [family]


class CustomMetrics(Collector):
    """All metrics made by models of one server.

    A metric is released by its finalizer, which Python may run in the middle of any other call of the same
    thread. So `release` never waits for the lock: if another call holds it, that call removes the metric.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._families: dict[str, CustomFamily] = {}
        self._released: deque[tuple[CustomFamily, CustomMetric | None]] = deque()
        self._lock = threading.Lock()

    def collect(self) -> list[Metric]:
        with self._taken():
            return list(self._registry.collect())

    def family(self, name: str, description: str, kind: MetricKind) -> CustomFamily:
        """Return the family ``name``, with one more holder. Its first maker sets the description.

        Raises `InvalidArgument` for a name that Prometheus or the server does not allow, `AlreadyExists` if a
        family of another kind has the name, or another family has samples of the same name.
        """
        check_family_name(name)
        with self._taken():
            family = self._families.get(name)
            if family is None:
                family = CustomFamily(name, description, kind)
                try:
                    self._registry.register(family)
                except ValueError as error:
                    raise AlreadyExists(f"metric family '{name}' ({kind}) would clash with another: {error}") from None
                self._families[name] = family
            elif family.kind != kind:
                raise AlreadyExists(f"Family name already exists with different type: '{name}' is a {family.kind}")
            family.holders += 1
        return family

    def metric(self, family: CustomFamily, labels: Mapping[str, str], buckets: Sequence[float] | None) -> CustomMetric:
        """Return the metric of ``family`` with ``labels``, with one more holder. Raises `InvalidArgument`."""
        check_labels(family.name, family.kind, labels)
        check_buckets(family.kind, buckets)
        made = CustomMetric(family, labels, buckets or ())
        with self._taken():
            metric = family.metrics.setdefault(tuple(made.labels.items()), made)
            metric.holders += 1
            family.holders += 1
        return metric

    def release(self, family: CustomFamily, metric: CustomMetric | None = None) -> None:
        """Release one use of ``metric``, or of the family itself. Never blocks."""
        self._released.append((family, metric))
        self._sweep()

    @contextmanager
    def _taken(self) -> Iterator[None]:
        with self._lock:
            yield
        self._sweep()

    def _sweep(self) -> None:
        """Remove released metrics from the page, unless another thread holds the lock: it removes them itself."""
        # Checked again after the lock is released: another thread may have failed to get the lock until then.
        while self._released and self._lock.acquire(blocking=False):
            try:
                while self._released:
                    self._drop(*self._released.popleft())
            finally:
                self._lock.release()

    def _drop(self, family: CustomFamily, metric: CustomMetric | None) -> None:
        family.holders -= 1
        if metric is not None:
            metric.holders -= 1
            if not metric.holders:
                del family.metrics[tuple(metric.labels.items())]
        if not family.holders:
            self._registry.unregister(family)
            del self._families[family.name]


class InstanceMetrics:
    """The custom metrics of one instance, by handle. Raises as `CustomMetrics` does."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self._metrics = metrics
        #: For a handle of a family: the family and None. For that of a metric: its family and the metric.
        self._by_handle: dict[int, tuple[CustomFamily, CustomMetric | None]] = {}
        self._handles = count(1)

    def family(self, name: str, description: str, kind: MetricKind) -> int:
        return self._hold(self._metrics.family(name, description, kind), None)

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        parent, _ = self._by_handle.get(family, (None, None))
        if parent is None:
            raise InternalError("the metric family has been released")
        return self._hold(parent, self._metrics.metric(parent, labels, buckets))

    def update(self, metric: int, operation: MetricOperation, value: float, times: int = 1) -> None:
        self._metric(metric).update(operation, value, times)

    def value(self, metric: int) -> float:
        return self._metric(metric).value()

    def release(self, handle: int) -> None:
        """Release a metric or a family. Does nothing if it was released before."""
        if (entry := self._by_handle.pop(handle, None)) is not None:
            self._metrics.release(*entry)

    def close(self) -> None:
        """Release all metrics and families."""
        for handle in tuple(self._by_handle):
            self.release(handle)

    def _hold(self, family: CustomFamily, metric: CustomMetric | None) -> int:
        self._by_handle[handle := next(self._handles)] = family, metric
        return handle

    def _metric(self, handle: int) -> CustomMetric:
        _, metric = self._by_handle.get(handle, (None, None))
        if metric is None:
            raise InternalError("the metric has been released")
        return metric
