"""CPU, memory and GPU gauges, beside psutil, arithmetic and nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import psutil
import pytest
from prometheus_client import Metric

from headrace_http.machine_metrics import GpuCollector, HostCollector, PinnedPoolCollector

needs_proc = pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="there is no /proc here")


def values(families: Iterable[Metric]) -> dict[str, float]:
    return {sample.name: sample.value for family in families for sample in family.samples}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def write_proc(proc: Path, cpu: str) -> None:
    (proc / "stat").write_text(f"cpu  {cpu}\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    (proc / "meminfo").write_text("MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    300 kB\n")


def test_utilisation_is_the_share_of_ticks_not_idle_since_the_last_reading(tmp_path: Path) -> None:
    write_proc(tmp_path, "10 0 10 100 0 0 0 0 0 0")
    clock = Clock()
    collector = HostCollector(1.0, tmp_path, clock)
    assert values(collector.collect())["nv_cpu_utilization"] == 0
    write_proc(tmp_path, "20 5 20 160 10 2 2 1 50 50")  # 30 busy, 70 idle; guest time is in user time already
    clock.now = 1.0
    assert values(collector.collect())["nv_cpu_utilization"] == pytest.approx(30 / 100)


def test_a_second_scraper_does_not_shorten_the_measurement_of_the_first(tmp_path: Path) -> None:
    write_proc(tmp_path, "0 0 0 0 0 0 0 0 0 0")
    clock = Clock()
    collector = HostCollector(1.0, tmp_path, clock)
    write_proc(tmp_path, "50 0 0 50 0 0 0 0 0 0")
    clock.now = 1.0
    assert values(collector.collect())["nv_cpu_utilization"] == 0.5
    write_proc(tmp_path, "51 0 0 50 0 0 0 0 0 0")
    clock.now = 1.5
    assert values(collector.collect())["nv_cpu_utilization"] == 0.5


def test_memory_used_is_what_is_not_available(tmp_path: Path) -> None:
    write_proc(tmp_path, "0 0 0 0 0 0 0 0 0 0")
    found = values(HostCollector(1.0, tmp_path).collect())
    assert found["nv_cpu_memory_total_bytes"] == 1000 * 1024
    assert found["nv_cpu_memory_used_bytes"] == 700 * 1024


@needs_proc
def test_this_machine_has_the_memory_that_psutil_sees() -> None:
    found = values(HostCollector(1.0).collect())
    memory = psutil.virtual_memory()
    assert found["nv_cpu_memory_total_bytes"] == memory.total
    assert found["nv_cpu_memory_used_bytes"] == pytest.approx(memory.total - memory.available, rel=0.2)
    assert 0 <= found["nv_cpu_utilization"] <= 1


def test_pinned_pool_shows_the_size_of_the_flag_and_no_use() -> None:
    assert values(PinnedPoolCollector(268435456).collect()) == {
        "nv_pinned_memory_pool_total_bytes": 268435456,
        "nv_pinned_memory_pool_used_bytes": 0,
    }


def test_cpu_only_servers_show_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_SERVER_CPU_ONLY", "1")
    assert values(GpuCollector().collect()) == {}


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_machine_without_a_gpu_shows_none() -> None:
    assert values(GpuCollector().collect()) == {}


class RecordedNvml(ModuleType):
    """A fake of the module ``pynvml``: two GPUs, in NVML's units. The second one does not report its power (MIG)."""

    class NVMLError(Exception):
        """The exception that every function of the real library raises."""

    energy_millijoules = 5_000
    powers_milliwatts: ClassVar = [71_500, None]

    def __init__(self) -> None:
        super().__init__("pynvml")

    def nvmlInit(self) -> None:  # noqa: N802
        """Nothing to do."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, gpu: int) -> str:  # noqa: N802
        return f"GPU-{gpu}"

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=[25, 75][gpu])

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=80 << 30, used=(gpu + 1) << 30)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:  # noqa: N802
        power = self.powers_milliwatts[gpu]
        if power is None:
            raise self.NVMLError
        return power

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:  # noqa: N802
        return self.energy_millijoules


def test_gauges_of_gpus_are_in_the_units_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = RecordedNvml()
    monkeypatch.delenv("TRITON_SERVER_CPU_ONLY", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    collector = GpuCollector()
    nvml.energy_millijoules += 2_500
    found = {
        family.name: {sample.labels["gpu_uuid"]: sample.value for sample in family.samples}
        for family in collector.collect()
    }
    assert found == {
        "nv_gpu_utilization": {"GPU-0": 0.25, "GPU-1": 0.75},
        "nv_gpu_memory_total_bytes": {"GPU-0": 80 << 30, "GPU-1": 80 << 30},
        "nv_gpu_memory_used_bytes": {"GPU-0": 1 << 30, "GPU-1": 2 << 30},
        "nv_gpu_power_usage": {"GPU-0": 71.5},
        "nv_gpu_power_limit": {"GPU-0": 700, "GPU-1": 700},
        "nv_energy_consumption": {"GPU-0": 2.5, "GPU-1": 2.5},
    }


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU here")
def test_gpu_gauges_are_those_of_nvidia_smi() -> None:
    pytest.importorskip("pynvml")
    assert "TRITON_SERVER_CPU_ONLY" not in os.environ
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total,power.limit", "--format=csv,noheader,nounits"]
    smi = [line.split(", ") for line in subprocess.check_output(query, text=True).splitlines()]
    families = {family.name: family.samples for family in GpuCollector().collect()}
    total = {sample.labels["gpu_uuid"]: sample.value for sample in families["nv_gpu_memory_total_bytes"]}
    limit = {sample.labels["gpu_uuid"]: sample.value for sample in families["nv_gpu_power_limit"]}
    assert {uuid: int(bytes_) // 2**20 for uuid, bytes_ in total.items()} == {uuid: int(mib) for uuid, mib, _ in smi}
    assert limit == pytest.approx({uuid: float(watts) for uuid, _, watts in smi})
    assert all(sample.value >= 0 for sample in families["nv_energy_consumption"])
