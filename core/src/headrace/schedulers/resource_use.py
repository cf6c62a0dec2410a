"""Who has what of a resource of the rate limiter, and who waits for it: for ``explain`` and the metrics page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.executors.devices import Resource
from headrace.telemetry.published import PublishedMetric


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """``resource`` at one moment. ``units`` is how much there is; ``held`` and ``wanted`` have the instances, by name,
    that execute with some of it, and that have something to execute and wait for it."""

    resource: Resource
    units: int
    held: Mapping[str, int]
    wanted: Mapping[str, int]

    name: ClassVar[str] = "rate_limiter"
    metrics: ClassVar[Sequence[PublishedMetric]] = (
        PublishedMetric("headrace_rate_limiter_units", "Units that there are of a resource"),
        PublishedMetric("headrace_rate_limiter_units_in_use", "Units that instances hold while they execute"),
        PublishedMetric("headrace_rate_limiter_waiting_executions", "Executions that wait for units of a resource"),
    )

    @property
    def labels(self) -> dict[str, str]:
        """Those of its series: what the whole server shares has no device."""
        name, device = self.resource.name, self.resource.device
        return {"resource": name} if device is None else {"device": str(device), "resource": name}

    def measure(self) -> Mapping[str, float]:
        units, in_use, waiting = (metric.name for metric in self.metrics)
        return {units: self.units, in_use: sum(self.held.values()), waiting: len(self.wanted)}

    def document(self) -> dict[str, Any]:
        """What ``GET .../explain`` says of it."""
        return {
            "resource": self.resource.name,
            "device": self.resource.device,
            "units": self.units,
            "in_use": sum(self.held.values()),
            "held": dict(self.held),
            "wanted": dict(self.wanted),
        }
