"""Metrics where there is no server: kept in memory, under the server's rules, for unit tests of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.backends.services import MetricKind, MetricOperation
from penstock.errors import InvalidArgument, Unsupported


class MetricStore(Protocol):
    """The part of `penstock.backends.services.Services` that is about metrics."""

    def metric_family(self, name: str, description: str, kind: MetricKind) -> int: ...

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int: ...

    def update_metric(self, metric: int, operation: MetricOperation, value: float) -> None: ...

    def metric_value(self, metric: int) -> float: ...

    def release(self, handle: int) -> None: ...


@dataclass(slots=True)
class _Kept:
    kind: MetricKind
    value: float = 0.0
    observed: list[float] = field(default_factory=list)


class KeptMetrics:
    """A `MetricStore` in memory. A handle is a position in a list; equal labels share a metric."""

    def __init__(self) -> None:
        self._families: dict[str, MetricKind] = {}
        self._names: list[str] = []
        self._metrics: dict[tuple[str, frozenset[tuple[str, str]]], _Kept] = {}
        self._handles: list[_Kept] = []

    def metric_family(self, name: str, description: str, kind: MetricKind) -> int:
        if self._families.setdefault(name, kind) != kind:
            raise InvalidArgument(f"metric family '{name}' is a {self._families[name]}, not a {kind}")
        self._names.append(name)
        return len(self._names) - 1

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        name = self._names[family]
        kept = self._metrics.setdefault((name, frozenset(labels.items())), _Kept(self._families[name]))
        self._handles.append(kept)
        return len(self._handles) - 1

    def update_metric(self, metric: int, operation: MetricOperation, value: float) -> None:
        kept = self._handles[metric]
        allowed = {"counter": ("increment",), "gauge": ("increment", "set"), "histogram": ("observe",)}
        if operation not in allowed[kept.kind]:
            raise Unsupported(f"TRITONSERVER_METRIC_KIND_{kept.kind.upper()} does not support {operation.capitalize()}")
        if kept.kind == "counter" and value < 0:
            raise InvalidArgument(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        if operation == "observe":
            kept.observed.append(value)
        else:
            kept.value = value if operation == "set" else kept.value + value

    def metric_value(self, metric: int) -> float:
        kept = self._handles[metric]
        if kept.kind == "histogram":
            raise Unsupported("TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value")
        return kept.value

    def release(self, handle: int) -> None:
        """Values stay for as long as the test runs."""


#: Those of this interpreter.
KEPT = KeptMetrics()
