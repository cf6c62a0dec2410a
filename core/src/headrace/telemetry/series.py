"""The metrics that a model can make: counter, gauge and histogram (docs/spec/behaviours.md section 7.6).

Any thread. An update that raises changes nothing. Model processes import this module, too, so it does not need
prometheus-client.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import ClassVar, Final, Literal, TypeAlias

from headrace.errors import InvalidArgument, Unsupported

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]
MetricOperation: TypeAlias = Literal["increment", "set", "observe"]
#: A line of the metrics page: name, labels and value.
MetricLine: TypeAlias = tuple[str, dict[str, str], float]

OPERATIONS: Final[Mapping[MetricKind, Set[MetricOperation]]] = {
    "counter": {"increment"},
    "gauge": {"increment", "set"},
    "histogram": {"observe"},
}


def check_metric_update(kind: MetricKind, operation: MetricOperation, value: float) -> None:
    """Raise `Unsupported` if ``kind`` does not have ``operation``, `InvalidArgument` if it does not allow ``value``."""
    if operation not in OPERATIONS[kind]:
        raise Unsupported(f"{_long(kind)} does not support {operation.capitalize()}")
    if kind == "counter" and not value >= 0:  # also true for NaN
        raise InvalidArgument(f"{_long(kind)} can only be incremented monotonically by non-negative values.")


def metric_without_value(kind: MetricKind) -> Unsupported:
    """Return the error for a read of a metric that has no single value."""
    return Unsupported(f"{_long(kind)} does not support Value")


def _long(kind: MetricKind) -> str:
    return f"TRITONSERVER_METRIC_KIND_{kind.upper()}"


class Series(ABC):
    """One metric: a kind with ``labels``, sorted by name. ``holders`` is the number of instances that use it."""

    kind: ClassVar[MetricKind]

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = dict(labels)
        self.holders = 0
        self._lock = threading.Lock()

    def update(self, operation: MetricOperation, value: float) -> None:
        """Apply ``operation`` with ``value``. Raises as `check_metric_update` does."""
        check_metric_update(self.kind, operation, value)
        with self._lock:
            self._update(operation, value)

    def value(self) -> float:
        """Return the value. Raises `Unsupported` for a histogram."""
        raise metric_without_value(self.kind)

    @abstractmethod
    def _update(self, operation: MetricOperation, value: float) -> None:
        """Change the metric. Called under its lock."""

    @abstractmethod
    def lines(self, name: str) -> Iterator[MetricLine]:
        """Yield the lines of the metrics page."""


class _Number(Series):
    """A metric that is one number."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self._value = 0.0

    def value(self) -> float:
        return self._value

    def lines(self, name: str) -> Iterator[MetricLine]:
        yield name, self.labels, self._value


class Counter(_Number):
    kind: ClassVar[MetricKind] = "counter"

    def _update(self, operation: MetricOperation, value: float) -> None:
        self._value += value


class Gauge(_Number):
    kind: ClassVar[MetricKind] = "gauge"

    def _update(self, operation: MetricOperation, value: float) -> None:
        self._value = value if operation == "set" else self._value + value


class BucketCounts(Series):
    """A histogram. ``bounds`` are its upper bounds in ascending order, without +Inf."""

    kind: ClassVar[MetricKind] = "histogram"

    def __init__(self, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        super().__init__(labels)
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def _update(self, operation: MetricOperation, value: float) -> None:
        self._counts[bisect_left(self._bounds, value) if value == value else -1] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[MetricLine]:
        with self._lock:
            counts, total = list(accumulate(self._counts)), self._sum
        yield f"{name}_count", self.labels, counts[-1]
        yield f"{name}_sum", self.labels, total
        bounds = [*(format(bound, ".16g") for bound in self._bounds), "+Inf"]
        for bound, count in zip(bounds, counts, strict=True):
            yield f"{name}_bucket", {**self.labels, "le": bound}, count
