"""The use of a resource of the rate limiter: for ``explain`` and the metrics page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.executors.devices import Resource
from headrace.telemetry.published import PublishedMetric


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """The use of ``resource`` at one moment. ``units`` is how many units exist.

    ``used_by`` maps each executing instance to its units. ``wanted_by`` maps each waiting instance to the units that it
    needs.
    """

    resource: Resource
    units: int
    used_by: Mapping[str, int]
    wanted_by: Mapping[str, int]

    name: ClassVar[str] = "rate_limiter"
    metrics: ClassVar[Sequence[PublishedMetric]] = (
        PublishedMetric("headrace_rate_limiter_units", "Units that there are of a resource"),
        PublishedMetric("headrace_rate_limiter_units_in_use", "Units that instances hold while they execute"),
        PublishedMetric("headrace_rate_limiter_waiting_executions", "Executions that wait for units of a resource"),
    )

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its series. A resource of the whole server has no device."""
        name, device = self.resource.name, self.resource.device
        return {"resource": name} if device is None else {"device": str(device), "resource": name}

    def measure(self) -> Mapping[str, float]:
        units, in_use, waiting = (metric.name for metric in self.metrics)
        return {units: self.units, in_use: sum(self.used_by.values()), waiting: len(self.wanted_by)}

    def document(self) -> dict[str, Any]:
        """Return its entry in the response of ``GET .../explain``."""
        return {
            "resource": self.resource.name,
            "device": self.resource.device,
            "units": self.units,
            "in_use": sum(self.used_by.values()),
            "used_by": dict(self.used_by),
            "wanted_by": dict(self.wanted_by),
        }
