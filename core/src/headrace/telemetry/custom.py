"""Metrics that models make (docs/spec/behaviours.md section 7.6). Any thread.

Instances that name the same family and the same labels share one metric. It is on the page from
the first that makes it until the last has given it up, which an instance that ends always does.
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

#: What names of the server's own families begin with.
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
    """``holders`` is how many instances use it."""

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
    """All custom metrics of one server.

    A model's metric is given up by its finalizer, which may come in the middle of any other call of
    its thread. So `give_up` waits for nobody: what it finds taken, whoever has it sees to.
    """

    def __init__(self) -> None:
        self._families: dict[str, CustomFamily] = {}
        self._given_up: deque[tuple[CustomFamily, Series | None]] = deque()
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
        """The family ``name``, with one more holder. The first to make it describes it.

        Raises `InvalidArgument` for a name that Prometheus or the server does not allow,
        `AlreadyExists` if the name is taken by one of another kind.
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
        """The metric of ``family`` with ``labels``, with one more holder. Raises `InvalidArgument`."""
        made = _make(family, labels, buckets)
        with self._taken():
            series = family.series.setdefault(tuple(made.labels.items()), made)
            series.holders += 1
            family.holders += 1
        return series

    def give_up(self, family: CustomFamily, series: Series | None = None) -> None:
        """One holder less of ``series``, or of the family itself. Never blocks."""
        self._given_up.append((family, series))
        self._sweep()

    @contextmanager
    def _taken(self) -> Iterator[None]:
        with self._lock:
            yield
        self._sweep()

    def _sweep(self) -> None:
        """Take off the page what has been given up, unless somebody is at it, who will."""
        # Looked at again after each release: more may have come while the lock was being given up.
        while self._given_up and self._lock.acquire(blocking=False):
            try:
                while self._given_up:
                    self._drop(*self._given_up.popleft())
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


class Holding:
    """What one instance holds of the custom metrics, by handle. Raises as `CustomMetrics` does."""

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
            raise InternalError("the metric family has been given up")
        series = self._metrics.series(held, labels, buckets)
        handle = self._next()
        self._series[handle] = held, series
        return handle

    def update(self, metric: int, operation: MetricOperation, value: float) -> None:
        self._held(metric).update(operation, value)

    def value(self, metric: int) -> float:
        return self._held(metric).value()

    def release(self, handle: int) -> None:
        """Give up a metric or a family; nothing if that was done before."""
        if (family := self._families.pop(handle, None)) is not None:
            self._metrics.give_up(family)
        elif (held := self._series.pop(handle, None)) is not None:
            self._metrics.give_up(*held)

    def close(self) -> None:
        """Give up everything."""
        for handle in (*self._series, *self._families):
            self.release(handle)

    def _held(self, metric: int) -> Series:
        held = self._series.get(metric)
        if held is None:
            raise InternalError("the metric has been given up")
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
            f"metric family name {name!r}: it takes letters, digits, '_' and ':', and no digit in front"
        )
    if name.startswith(OWN):
        raise InvalidArgument(f"metric family name '{name}': names like this are the server's own")


def _check_labels(family: CustomFamily, labels: Mapping[str, str]) -> None:
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"metric family '{family.name}': label {name!r} is {value!r}; both must be strings")
        if not _LABEL_NAME.fullmatch(name) or (family.kind == "histogram" and name == "le"):
            raise InvalidArgument(
                f"metric family '{family.name}': label name {name!r}: it takes letters, digits and '_', with a letter "
                "or one '_' in front, and a histogram has 'le' already"
            )
