"""The machine's metrics, read at scrape time (docs/spec/behaviours.md section 7.4).

CPU and memory are read from /proc; GPUs from NVML, if the optional package ``nvidia-ml-py`` and a driver are installed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.config.options import ServerOptions
from headrace.telemetry.exposition import family_filter

PROC = Path("/proc")


def machine_metrics(options: ServerOptions) -> Callable[[], Iterable[Metric]]:
    """Return a function that reads the metrics of the machine which ``options`` ask for. Any thread may call it.

    Both block: this loads the driver of the GPUs, and the function reads it. Raises `ConfigError` for a pattern of
    ``--metrics-config`` that no name can match.
    """
    collectors: list[Collector] = [PinnedPoolCollector(options.pinned_memory_pool_byte_size)]
    if options.allow_cpu_metrics and HostCollector.is_possible():
        collectors.append(HostCollector(options.metrics_interval_ms / 2000))
    if options.allow_gpu_metrics:
        collectors.append(GpuCollector())
    shows = family_filter(options.metrics_config)
    return lambda: [family for each in collectors for family in each.collect() if shows(family.name)]


class HostCollector(Collector):
    """``nv_cpu_utilization`` and ``nv_cpu_memory_*``.

    Utilisation is the share of time that the cores were not idle, since the last reading. A reading is
    kept for ``interval_s``, so that two scrapers do not shorten each other's interval.
    """

    @staticmethod
    def is_possible() -> bool:
        """True if this machine has /proc/meminfo (Linux)."""
        return (PROC / "meminfo").exists()

    def __init__(self, interval_s: float, proc: Path = PROC, clock: Callable[[], float] = monotonic) -> None:
        self._interval_s, self._proc, self._clock = interval_s, proc, clock
        self._read_at = clock()
        self._times = self._cpu_times()
        self._utilization = 0.0

    def collect(self) -> Iterator[Metric]:
        self._refresh()
        total, available = self._memory()
        yield GaugeMetricFamily("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._utilization)
        yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total)
        yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", total - available)

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._read_at < self._interval_s:
            return
        busy, total = self._cpu_times()
        busy_before, total_before = self._times
        if total > total_before:
            self._utilization = (busy - busy_before) / (total - total_before)
        self._read_at, self._times = now, (busy, total)

    def _cpu_times(self) -> tuple[int, int]:
        """Return busy and total clock ticks since boot. The total is the sum of the first eight fields of proc(5)."""
        fields = [int(field) for field in (self._proc / "stat").read_text().splitlines()[0].split()[1:9]]
        idle, iowait = fields[3], fields[4]
        return sum(fields) - idle - iowait, sum(fields)

    def _memory(self) -> tuple[int, int]:
        lines = (self._proc / "meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024


class PinnedPoolCollector(Collector):
    """``nv_pinned_memory_pool_*``: the configured size, and 0 used, because backends do not report it."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", self._total_bytes
        )
        yield GaugeMetricFamily("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", 0)


#: Name and help as in Triton (docs/spec/behaviours.md section 7.4), and a function that reads the value from NVML.
_GPU_GAUGES: tuple[tuple[str, str, Callable[[Any, Any], float]], ...] = (
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
_ENERGY = ("nv_energy_consumption", "GPU energy consumption in joules since the Triton Server started")


class GpuCollector(Collector):
    """``nv_gpu_*`` and ``nv_energy_consumption`` of every GPU, labelled ``gpu_uuid``.

    Empty without NVML. A value that a GPU does not report (power under MIG) is left out.
    """

    def __init__(self) -> None:
        self._nvml = _load_nvml()
        self._gpus = {} if self._nvml is None else _gpus(self._nvml)
        self._energy_at_start = {uuid: self._ask(_energy_joules, gpu) for uuid, gpu in self._gpus.items()}

    def collect(self) -> Iterator[Metric]:
        for name, documentation, ask in _GPU_GAUGES:
            yield self._family(Metric(name, documentation, "gauge"), ask)
        yield self._family(Metric(*_ENERGY, "counter"), _energy_joules, self._energy_at_start)

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
    """Return the initialised NVML module, or None."""
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
