"""The kinds of metric that a model may make, and what may be done to each (docs/spec/behaviours.md section 7.6)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final, Literal, TypeAlias

from headrace.errors import InvalidArgument, Unsupported

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]
MetricOperation: TypeAlias = Literal["increment", "set", "observe"]

OPERATIONS: Final[Mapping[MetricKind, Set[MetricOperation]]] = {
    "counter": {"increment"},
    "gauge": {"increment", "set"},
    "histogram": {"observe"},
}


def check_metric_update(kind: MetricKind, operation: MetricOperation, value: float) -> None:
    """Raises `Unsupported` for an operation of another kind, `InvalidArgument` for the value."""
    if operation not in OPERATIONS[kind]:
        raise Unsupported(f"{_long(kind)} does not support {operation.capitalize()}")
    if kind == "counter" and not value >= 0:  # no number, too
        raise InvalidArgument(f"{_long(kind)} can only be incremented monotonically by non-negative values.")


def metric_without_value(kind: MetricKind) -> Unsupported:
    """What whoever asks for the value of a metric that has none is told."""
    return Unsupported(f"{_long(kind)} does not support Value")


def _long(kind: MetricKind) -> str:
    return f"TRITONSERVER_METRIC_KIND_{kind.upper()}"
