"""Metrics that models make (docs/spec/behaviours.md section 7.6). Any thread.

Instances that name the same family and the same labels share one metric. It is on the page until the
last instance that uses it releases it. An instance that ends releases all of its metrics.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.errors import AlreadyExists, InternalError, InvalidArgument
from headrace.telemetry.series import BucketCounts, Counter, Gauge, MetricKind, MetricOperation, Series

#: Prefixes of the names of the server's own families.
OWN = (
    "headrace_",
    "nv_cache_",
    "nv_cpu_",
    "nv_energy_",
    "nv_gpu_",
    "nv_inference_",
    "nv_model_",
    "nv_pinned_memory_",
)
_FAMILY_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(slots=True, eq=False)
class CustomFamily:
    """A metric family made by models. ``holders`` is the number of uses: by instances, and by its series."""

    name: str
    description: str
    kind: MetricKind
    holders: int = 0
    series: dict[tuple[tuple[str, str], ...], Series] = field(default_factory=dict)

    @property
    def sample_names(self) -> set[str]:
        ends = ("", "_bucket", "_count", "_sum") if self.kind == "histogram" else ("",)
        return {self.name + end for end in ends}


class CustomMetrics(Collector):
    """All metrics made by models of one server.

    A metric is released by its finalizer, which Python may run in the middle of any other call of the same
    thread. So `release` never waits for the lock: if another call holds it, that call removes the metric.
    """

    def __init__(self) -> None:
        self._families: dict[str, CustomFamily] = {}
        self._released: deque[tuple[CustomFamily, Series | None]] = deque()
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        with self._taken():
            found = [(family, list(family.series.values())) for _, family in sorted(self._families.items())]
        for family, series in found:
            metric = Metric(family.name, family.description, family.kind)
            for one in series:
                metric.samples += (Sample(*line) for line in one.lines(family.name))
            yield metric

    def family(self, name: str, description: str, kind: MetricKind) -> CustomFamily:
        """Return the family ``name``, with one more holder. Its first maker sets the description.

        Raises `InvalidArgument` for a name that Prometheus or the server does not allow, `AlreadyExists`
        if a family of another kind has the name.
        """
        _check_name(name)
        with self._taken():
            family = self._families.get(name)
            if family is None:
                family = self._add(CustomFamily(name, description, kind))
            elif family.kind != kind:
                raise AlreadyExists(f"Family name already exists with different type: '{name}' is a {family.kind}")
            family.holders += 1
        return family

    def series(self, family: CustomFamily, labels: Mapping[str, str], buckets: Sequence[float] | None) -> Series:
        """Return the metric of ``family`` with ``labels``, with one more holder. Raises `InvalidArgument`."""
        made = _make(family, labels, buckets)
        with self._taken():
            series = family.series.setdefault(tuple(made.labels.items()), made)
            series.holders += 1
            family.holders += 1
        return series

    def release(self, family: CustomFamily, series: Series | None = None) -> None:
        """Release one use of ``series``, or of the family itself. Never blocks."""
        self._released.append((family, series))
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

    def _drop(self, family: CustomFamily, series: Series | None) -> None:
        family.holders -= 1
        if series is not None:
            series.holders -= 1
            if not series.holders:
                del family.series[tuple(series.labels.items())]
        if not family.holders:
            del self._families[family.name]

    def _add(self, made: CustomFamily) -> CustomFamily:
        for family in self._families.values():
            if family.sample_names & made.sample_names:
                raise AlreadyExists(
                    f"metric family '{made.name}' ({made.kind}) would clash with '{family.name}' ({family.kind})"
                )
        self._families[made.name] = made
        return made


class InstanceMetrics:
    """The custom metrics of one instance, by handle. Raises as `CustomMetrics` does."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self._metrics = metrics
        self._families: dict[int, CustomFamily] = {}
        self._series: dict[int, tuple[CustomFamily, Series]] = {}
        self._last = 0
        self._lock = threading.Lock()

    def family(self, name: str, description: str, kind: MetricKind) -> int:
        family = self._metrics.family(name, description, kind)
        handle = self._next()
        self._families[handle] = family
        return handle

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        held = self._families.get(family)
        if held is None:
            raise InternalError("the metric family has been released")
        series = self._metrics.series(held, labels, buckets)
        handle = self._next()
        self._series[handle] = held, series
        return handle

    def update(self, metric: int, operation: MetricOperation, value: float) -> None:
        self._held(metric).update(operation, value)

    def value(self, metric: int) -> float:
        return self._held(metric).value()

    def release(self, handle: int) -> None:
        """Release a metric or a family. Does nothing if it was released before."""
        if (family := self._families.pop(handle, None)) is not None:
            self._metrics.release(family)
        elif (held := self._series.pop(handle, None)) is not None:
            self._metrics.release(*held)

    def close(self) -> None:
        """Release all metrics and families."""
        for handle in (*self._series, *self._families):
            self.release(handle)

    def _held(self, metric: int) -> Series:
        held = self._series.get(metric)
        if held is None:
            raise InternalError("the metric has been released")
        return held[1]

    def _next(self) -> int:
        with self._lock:
            self._last += 1
            return self._last


def _make(family: CustomFamily, labels: Mapping[str, str], buckets: Sequence[float] | None) -> Series:
    _check_labels(family, labels)
    ordered = dict(sorted(labels.items()))
    if family.kind != "histogram":
        if buckets is not None:
            raise InvalidArgument(f"Unexpected args found in {family.kind} Metric constructor.")
        return Counter(ordered) if family.kind == "counter" else Gauge(ordered)
    if buckets is None:
        raise InvalidArgument("Bucket boundaries not found in Metric args.")
    if not all(map(isfinite, buckets)) or not all(low < high for low, high in pairwise(buckets)):
        raise InvalidArgument(f"Bucket Boundaries must be strictly sorted, finite numbers; they are {list(buckets)}")
    return BucketCounts(ordered, buckets)


def _check_name(name: str) -> None:
    if not _FAMILY_NAME.fullmatch(name):
        raise InvalidArgument(
            f"metric family name {name!r}: it must have only letters, digits, '_' and ':', and not begin with a digit"
        )
    if name.startswith(OWN):
        raise InvalidArgument(f"metric family name '{name}': names with this prefix are reserved for the server")


def _check_labels(family: CustomFamily, labels: Mapping[str, str]) -> None:
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"metric family '{family.name}': label {name!r} is {value!r}; both must be strings")
        if not _LABEL_NAME.fullmatch(name) or (family.kind == "histogram" and name == "le"):
            raise InvalidArgument(
                f"metric family '{family.name}': label name {name!r}: it must have only letters, digits and '_', and "
                "begin with a letter or a single '_'; 'le' is reserved in histograms"
            )
