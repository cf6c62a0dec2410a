"""GPU gauges through NVML, where the optional package ``nvidia-ml-py`` and a driver are there."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

#: Name, help and unit as Triton's (docs/spec/behaviours.md section 7.4); how to ask NVML for the value.
GAUGES: tuple[tuple[str, str, Callable[[Any, Any], float]], ...] = (
    (
        "nv_gpu_utilization",
        "GPU utilization rate [0.0 - 1.0)",
        lambda n, d: n.nvmlDeviceGetUtilizationRates(d).gpu / 100,
    ),
    ("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", lambda n, d: n.nvmlDeviceGetMemoryInfo(d).total),
    ("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", lambda n, d: n.nvmlDeviceGetMemoryInfo(d).used),
    ("nv_gpu_power_usage", "GPU power usage in watts", lambda n, d: n.nvmlDeviceGetPowerUsage(d) / 1000),
    (
        "nv_gpu_power_limit",
        "GPU power management limit in watts",
        lambda n, d: n.nvmlDeviceGetEnforcedPowerLimit(d) / 1000,
    ),
)
ENERGY = ("nv_energy_consumption", "GPU energy consumption in joules since the Triton Server started")


class GpuCollector(Collector):
    """``nv_gpu_*`` and ``nv_energy_consumption`` of every GPU, labelled ``gpu_uuid``.

    Empty where there is no NVML; a value that a GPU does not tell (power under MIG) is left out.
    """

    def __init__(self) -> None:
        self._nvml = _load_nvml()
        self._gpus = {} if self._nvml is None else _gpus(self._nvml)
        self._energy_at_start = {uuid: self._ask(_energy_joules, gpu) for uuid, gpu in self._gpus.items()}

    def collect(self) -> Iterator[Metric]:
        for name, documentation, ask in GAUGES:
            yield self._family(Metric(name, documentation, "gauge"), ask)
        yield self._family(Metric(*ENERGY, "counter"), _energy_joules, self._energy_at_start)

    def _family(
        self, family: Metric, ask: Callable[[Any, Any], float], since: dict[str, float | None] | None = None
    ) -> Metric:
        for uuid, gpu in self._gpus.items():
            value = self._ask(ask, gpu)
            if value is not None:
                value -= (since or {}).get(uuid) or 0
                family.samples.append(Sample(family.name, {"gpu_uuid": uuid}, value))
        return family

    def _ask(self, ask: Callable[[Any, Any], float], gpu: Any) -> float | None:
        assert self._nvml is not None
        try:
            return ask(self._nvml, gpu)
        except self._nvml.NVMLError:
            return None


def _load_nvml() -> Any:
    """The NVML module, initialised, or None."""
    if "TRITON_SERVER_CPU_ONLY" in os.environ:
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _gpus(nvml: Any) -> dict[str, Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return {nvml.nvmlDeviceGetUUID(handle): handle for handle in handles}


def _energy_joules(nvml: Any, gpu: Any) -> float:
    millijoules: int = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    return millijoules / 1000
