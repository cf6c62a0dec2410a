"""One custom metric: a number, or a histogram, that models change (docs/spec/behaviours.md section 7.6).

Any thread. A raise leaves the metric as it was.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

from prometheus_client.samples import Sample

from headrace.telemetry.kinds import MetricKind, MetricOperation, check_metric_update, metric_without_value


class Series(ABC):
    """``labels`` in order of their names. ``holders`` is how many instances use it."""

    kind: ClassVar[MetricKind]

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = dict(labels)
        self.holders = 0
        self._lock = threading.Lock()

    def update(self, operation: MetricOperation, value: float) -> None:
        """Raises `Unsupported` for an operation of another kind, `InvalidArgument` for the value."""
        check_metric_update(self.kind, operation, value)
        with self._lock:
            self._update(operation, value)

    def value(self) -> float:
        """The number; raises `Unsupported` if it is not one."""
        raise metric_without_value(self.kind)

    @abstractmethod
    def _update(self, operation: MetricOperation, value: float) -> None:
        """The change itself, one at a time."""

    @abstractmethod
    def samples(self, name: str) -> Iterator[Sample]:
        """What the metrics page shows of it."""


class Counter(Series):
    kind: ClassVar[MetricKind] = "counter"

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self._value = 0.0

    def value(self) -> float:
        return self._value

    def _update(self, operation: MetricOperation, value: float) -> None:
        self._value += value

    def samples(self, name: str) -> Iterator[Sample]:
        yield Sample(name, self.labels, self._value)


class Gauge(Series):
    kind: ClassVar[MetricKind] = "gauge"

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self._value = 0.0

    def value(self) -> float:
        return self._value

    def _update(self, operation: MetricOperation, value: float) -> None:
        self._value = value if operation == "set" else self._value + value

    def samples(self, name: str) -> Iterator[Sample]:
        yield Sample(name, self.labels, self._value)


class BucketCounts(Series):
    """A histogram; ``bounds`` ascend, +Inf left out."""

    kind: ClassVar[MetricKind] = "histogram"

    def __init__(self, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        super().__init__(labels)
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def _update(self, operation: MetricOperation, value: float) -> None:
        self._counts[bisect_left(self._bounds, value) if value == value else -1] += 1
        self._sum += value

    def samples(self, name: str) -> Iterator[Sample]:
        with self._lock:
            counts, total = list(accumulate(self._counts)), self._sum
        yield Sample(f"{name}_count", self.labels, counts[-1])
        yield Sample(f"{name}_sum", self.labels, total)
        bounds = [*(format(bound, ".16g") for bound in self._bounds), "+Inf"]
        for bound, count in zip(bounds, counts, strict=True):
            yield Sample(f"{name}_bucket", {**self.labels, "le": bound}, count)
