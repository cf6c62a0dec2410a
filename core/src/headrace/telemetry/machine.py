"""CPU and memory of the machine, read from /proc at scrape time (docs/spec/behaviours.md section 7.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

PROC = Path("/proc")


class HostCollector(Collector):
    """``nv_cpu_utilization`` and ``nv_cpu_memory_*``.

    Utilisation is the share of time not idle, of all cores, since the reading before. A reading is
    kept for ``interval_s``, so that two scrapers at once do not shorten each other's measurement.
    """

    @staticmethod
    def is_possible() -> bool:
        """Whether this machine has a /proc that tells: Linux."""
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
        """Busy and total clock ticks since boot; see proc(5), whose first eight fields add up."""
        fields = [int(field) for field in (self._proc / "stat").read_text().splitlines()[0].split()[1:9]]
        idle, iowait = fields[3], fields[4]
        return sum(fields) - idle - iowait, sum(fields)

    def _memory(self) -> tuple[int, int]:
        lines = (self._proc / "meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024


class PinnedPoolCollector(Collector):
    """``nv_pinned_memory_pool_*``: the size asked for, of which no backend here takes any."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", self._total_bytes
        )
        yield GaugeMetricFamily("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", 0)
