"""The metrics of the control mode, and the memory of each model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from headrace import LoadControl, Measured, PublishedMetric, Publisher


class OnDemandMetrics:
    """The numbers of the control mode, in the order of ``metrics``."""

    name = "on-demand"
    metrics: ClassVar[Sequence[PublishedMetric]] = (
        PublishedMetric("headrace_on_demand_memory_bytes", "Memory that all models are charged, in bytes"),
        PublishedMetric("headrace_on_demand_budget_bytes", "Memory that all models may use, in bytes; 0: no limit"),
        PublishedMetric("headrace_on_demand_waiting", "Number of requests that wait for a model"),
        PublishedMetric("headrace_on_demand_loads_total", "Number of models loaded", "counter"),
        PublishedMetric("headrace_on_demand_failed_loads_total", "Number of loads that failed", "counter"),
        PublishedMetric("headrace_on_demand_evictions_total", "Number of models evicted or unloaded", "counter"),
        PublishedMetric("headrace_on_demand_refused_total", "Number of requests whose model was not loaded", "counter"),
    )

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def measure(self) -> Mapping[str, Measured]:
        return {metric.name: value for metric, value in zip(self.metrics, self._values, strict=True)}


class ModelMemory:
    """The memory of one model version."""

    name = "memory"
    metrics = (PublishedMetric("headrace_model_memory_bytes", "Memory of the model version in bytes"),)

    def __init__(self, size: int) -> None:
        self._size = size

    def measure(self) -> Mapping[str, Measured]:
        return {self.metrics[0].name: self._size}


def memory_metrics(models: LoadControl, names: Iterable[str]) -> Iterator[tuple[dict[str, str], Publisher]]:
    """Yield the memory of each version of the models ``names``, with its labels."""
    for name in sorted(names):
        for served in models.served(name):
            yield {"model": name, "version": str(served.version)}, ModelMemory(served.memory_bytes)
