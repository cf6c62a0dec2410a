"""The kinds of metrics that a model can make, and the updates that each allows (docs/spec/behaviours.md section 7.6).

Model processes import this module, too, so it does not need prometheus-client.
"""

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
