"""The metrics of a part, read as a server reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace import Measured, PublishedMetric


class MeasuredPart(Protocol):
    """A part with metrics: a scheduler or a response cache."""

    @property
    def metrics(self) -> Sequence[PublishedMetric]: ...

    def measure(self) -> Mapping[str, Measured]: ...


def measured(part: MeasuredPart) -> list[tuple[PublishedMetric, float]]:
    """Return the value of each metric that ``part`` declares, the sum for one with a label. Fail if it measures other
    metrics."""
    if not part.metrics:
        return []
    found, declared = part.measure(), [metric.name for metric in part.metrics]
    assert sorted(found) == sorted(declared), f"it measures {sorted(found)}, and has declared {sorted(declared)}"
    return [(metric, _sum(metric.checked(found[metric.name]))) for metric in part.metrics]


def _sum(value: Measured) -> float:
    return sum(value.values()) if isinstance(value, Mapping) else value
