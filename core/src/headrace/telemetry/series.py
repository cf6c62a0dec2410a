"""The metrics that a model can make: kinds, names, labels, buckets and updates (docs/spec/behaviours.md section 7.6).

Model processes import this module, too, so it does not need prometheus-client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from math import isfinite
from typing import Final, Literal, TypeAlias

from headrace.errors import InvalidArgument, Unsupported

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]
MetricOperation: TypeAlias = Literal["increment", "set", "observe"]

OPERATIONS: Final[Mapping[MetricKind, Set[MetricOperation]]] = {
    "counter": {"increment"},
    "gauge": {"increment", "set"},
    "histogram": {"observe"},
}
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


def check_family_name(name: str) -> None:
    """Raise `InvalidArgument` for a name that Prometheus cannot read, or that the server reserves."""
    if not _FAMILY_NAME.fullmatch(name):
        raise InvalidArgument(
            f"metric family name {name!r}: it must have only letters, digits, '_' and ':', and not begin with a digit"
        )
    if name.startswith(OWN):
        raise InvalidArgument(f"metric family name '{name}': names with this prefix are reserved for the server")


def check_labels(family: str, kind: MetricKind, labels: Mapping[str, str]) -> None:
    """Raise `InvalidArgument` for labels that Prometheus cannot read."""
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"metric family '{family}': label {name!r} is {value!r}; both must be strings")
        if not _LABEL_NAME.fullmatch(name) or (kind == "histogram" and name == "le"):
            raise InvalidArgument(
                f"metric family '{family}': label name {name!r}: it must have only letters, digits and '_', and "
                "begin with a letter or a single '_'; 'le' is reserved in histograms"
            )


def check_buckets(kind: MetricKind, bounds: Sequence[float] | None) -> None:
    """Raise `InvalidArgument` unless a histogram has ascending ``bounds``, and another kind has none."""
    if kind != "histogram":
        if bounds is not None:
            raise InvalidArgument(f"Unexpected args found in {kind} Metric constructor.")
    elif bounds is None:
        raise InvalidArgument("Bucket boundaries not found in Metric args.")
    elif not all(map(isfinite, bounds)) or not all(low < high for low, high in pairwise(bounds)):
        raise InvalidArgument(f"Bucket Boundaries must be strictly sorted, finite numbers; they are {list(bounds)}")
