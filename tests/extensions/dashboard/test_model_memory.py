"""The memory of models that the dashboard shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace import ModelConfig
from headrace_dashboard.model_memory import MemoryOnDevice, ProcessMemory

MIB = 1 << 20


class Process:
    """An executor whose measurement takes 11 ms of CPU, longer than one pass may take."""

    def __init__(self, size: int, runs_on: str = "process") -> None:
        self.size, self.runs_on, self.measured = size, runs_on, 0

    def memory_bytes(self) -> int:
        self.measured += 1
        return self.size


def served(*executors: Process, memory_bytes: int = 0, gpus: tuple[int, ...] = ()) -> Any:
    config = ModelConfig()
    if gpus:
        config.instance_group.add(gpus=gpus)
    return SimpleNamespace(executors=executors, memory_bytes=memory_bytes, config=config)


def test_memory_without_a_source_is_unknown() -> None:
    memory = ProcessMemory()
    thread, first, second = Process(7, "thread"), Process(MIB), Process(2 * MIB)
    models = [served(thread), served(first, second), served(), served(thread, first)]
    assert memory.of(models[1]) == [MemoryOnDevice("host", None)], "not measured yet"
    memory.measure(models)
    found = [memory.of(each) for each in models]
    assert found == [[MemoryOnDevice("host")], [MemoryOnDevice("host", 3 * MIB)], [], [MemoryOnDevice("host")]]
    assert not thread.measured
    crashed = Process(0)
    memory.measure([served(crashed)])
    assert memory.of(served(first, crashed)) == [MemoryOnDevice("host")]


def test_the_control_mode_measures_processes_and_estimates_shares() -> None:
    memory = ProcessMemory()
    assert memory.of(served(Process(1), memory_bytes=5)) == [MemoryOnDevice("host", 5)]
    in_server = served(Process(1, "event_loop"), memory_bytes=5, gpus=(1, 0, 1))
    assert memory.of(in_server) == [MemoryOnDevice("host", 5, True), MemoryOnDevice("GPU 0"), MemoryOnDevice("GPU 1")]


def test_a_pass_is_short_and_covers_each_process_in_turn(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("headrace_dashboard.model_memory.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Process):
        def memory_bytes(self) -> int:
            now[0] += 0.006
            return super().memory_bytes()

    memory, processes = ProcessMemory(), [Slow(MIB) for _ in range(5)]
    models = [served(*processes)]
    for passes, measured in ((1, 2), (2, 4), (3, 6)):
        now[0] += 2
        memory.measure(models)
        memory.measure(models)
        assert sum(each.measured for each in processes) == measured, passes
    assert sorted(each.measured for each in processes) == [1, 1, 1, 1, 2]
