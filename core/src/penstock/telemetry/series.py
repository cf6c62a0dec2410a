"""One custom metric: a number, or a histogram, that models change (behaviours.md section 7.6).

Any thread. A raise leaves the metric as it was.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar, Literal, TypeAlias

from prometheus_client.samples import Sample

from penstock.errors import InvalidArgument, Unsupported

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Operation: TypeAlias = Literal["increment", "set", "observe"]


class Series(ABC):
    """``labels`` in order of their names. ``holders`` is how many instances use it."""

    kind: ClassVar[Kind]
    operations: ClassVar[frozenset[Operation]]

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = dict(labels)
        self.holders = 0
        self._lock = threading.Lock()

    def update(self, operation: Operation, value: float) -> None:
        """Raises `Unsupported` for an operation of another kind, `InvalidArgument` for the value."""
        if operation not in self.operations:
            raise Unsupported(f"{_long(self.kind)} does not support {operation.capitalize()}")
        with self._lock:
            self._update(operation, value)

    def value(self) -> float:
        """The number; raises `Unsupported` if it is not one."""
        raise Unsupported(f"{_long(self.kind)} does not support Value")

    @abstractmethod
    def _update(self, operation: Operation, value: float) -> None:
        """The change itself, one at a time."""

    @abstractmethod
    def samples(self, name: str) -> Iterator[Sample]:
        """What the metrics page shows of it."""


class Counter(Series):
    kind: ClassVar[Kind] = "counter"
    operations: ClassVar[frozenset[Operation]] = frozenset(("increment",))

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self._value = 0.0

    def value(self) -> float:
        return self._value

    def _update(self, operation: Operation, value: float) -> None:
        if not value >= 0:  # no number, too
            raise InvalidArgument(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        self._value += value

    def samples(self, name: str) -> Iterator[Sample]:
        yield Sample(name, self.labels, self._value)


class Gauge(Series):
    kind: ClassVar[Kind] = "gauge"
    operations: ClassVar[frozenset[Operation]] = frozenset(("increment", "set"))

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self._value = 0.0

    def value(self) -> float:
        return self._value

    def _update(self, operation: Operation, value: float) -> None:
        self._value = value if operation == "set" else self._value + value

    def samples(self, name: str) -> Iterator[Sample]:
        yield Sample(name, self.labels, self._value)


class BucketCounts(Series):
    """A histogram; ``bounds`` ascend, +Inf left out."""

    kind: ClassVar[Kind] = "histogram"
    operations: ClassVar[frozenset[Operation]] = frozenset(("observe",))

    def __init__(self, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        super().__init__(labels)
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def _update(self, operation: Operation, value: float) -> None:
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


def _long(kind: Kind) -> str:
    return f"TRITONSERVER_METRIC_KIND_{kind.upper()}"
