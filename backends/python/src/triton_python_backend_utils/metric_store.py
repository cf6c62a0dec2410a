"""Metrics where there is no server: kept in memory, under the server's rules, for unit tests of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace import InvalidArgument, MetricKind, MetricOperation, check_metric_update, metric_without_value


class MetricStore(Protocol):
    """The part of `headrace.backends.services.Services` that is about metrics."""

    def metric_family(self, name: str, description: str, kind: MetricKind) -> int: ...

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int: ...

    def update_metric(self, metric: int, operation: MetricOperation, value: float) -> None: ...

    def metric_value(self, metric: int) -> float: ...

    def release(self, handle: int) -> None: ...


@dataclass(slots=True)
class MetricInMemory:
    """The value of a counter or a gauge, and what a histogram has observed."""

    kind: MetricKind
    value: float = 0.0
    observed: tuple[float, ...] = ()


class MetricsInMemory:
    """A `MetricStore` in memory. ``metrics`` maps the name of a family and sorted labels to the metric.

    A handle is a position in a list; equal labels share a metric.
    """

    def __init__(self) -> None:
        self.metrics: dict[tuple[str, tuple[tuple[str, str], ...]], MetricInMemory] = {}
        self._families: dict[str, MetricKind] = {}
        self._names: list[str] = []
        self._handles: list[MetricInMemory] = []

    def metric_family(self, name: str, description: str, kind: MetricKind) -> int:
        if self._families.setdefault(name, kind) != kind:
            raise InvalidArgument(f"metric family '{name}' is a {self._families[name]}, not a {kind}")
        self._names.append(name)
        return len(self._names) - 1

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        name = self._names[family]
        kept = self.metrics.setdefault((name, tuple(sorted(labels.items()))), MetricInMemory(self._families[name]))
        self._handles.append(kept)
        return len(self._handles) - 1

    def update_metric(self, metric: int, operation: MetricOperation, value: float) -> None:
        kept = self._handles[metric]
        check_metric_update(kept.kind, operation, value)
        if operation == "observe":
            kept.observed += (value,)
        else:
            kept.value = value if operation == "set" else kept.value + value

    def metric_value(self, metric: int) -> float:
        kept = self._handles[metric]
        if kept.kind == "histogram":
            raise metric_without_value(kept.kind)
        return kept.value

    def release(self, handle: int) -> None:
        """Values stay, so that a test can look at them."""


#: Those of this interpreter.
IN_MEMORY = MetricsInMemory()
