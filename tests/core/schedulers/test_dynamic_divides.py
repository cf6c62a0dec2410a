"""CPU instances divide the requests in flight if executions are long and the config sets no batch size."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from headrace.backends.base import Device
from headrace.config.model_config_pb2 import ModelConfig
from headrace.schedulers import dynamic
from headrace.schedulers.base import InstanceInfo
from headrace.schedulers.dynamic import WORTH_DIVIDING_NS, DynamicScheduler
from headrace_testing.simulator import SchedulerSimulator, run_scenario

LONG_NS = WORTH_DIVIDING_NS


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "available_cores", lambda: 4)


def staged(instances: int, text: str = "", took_ns: int = LONG_NS) -> SchedulerSimulator:
    """As if the last execution had taken so long."""
    config = text_format.Parse(f'name: "m" max_batch_size: 8 dynamic_batching {{ {text} }}', ModelConfig())
    simulator = SchedulerSimulator(DynamicScheduler, config, instances)
    simulator.poll_instances()
    simulator.model_queue.sources[0].executed(took_ns)
    return simulator


async def send(simulator: SchedulerSimulator, count: int, rows: int = 1) -> None:
    for _ in range(count):
        simulator.send(rows)
    await simulator.settle()


def running(simulator: SchedulerSimulator) -> list[int]:
    """The requests that each instance runs."""
    return [len(instance.batch) for instance in simulator.instances]


def reasons(simulator: SchedulerSimulator) -> list[str]:
    document = simulator.model_queue.history.document(simulator.clock.now_ns())
    return [batch["reason"] for batch in document["batches"]]


@pytest.mark.parametrize(
    ("instances", "requests", "shares"),
    [(2, 6, [3, 3]), (2, 5, [3, 2]), (3, 7, [3, 3, 1]), (2, 1, [1, 0]), (1, 6, [6]), (4, 2, [1, 1, 0, 0])],
)
def test_simultaneous_requests_are_divided(instances: int, requests: int, shares: list[int]) -> None:
    async def run() -> None:
        simulator = staged(instances)
        await send(simulator, requests)
        assert sorted(running(simulator), reverse=True) == shares
        assert simulator.model_queue.pending == 0
        assert reasons(simulator) == ["divided"] * (sum(map(bool, shares)) - 1) + ["idle_instance"]

    run_scenario(run)


def test_requests_on_other_instances_count() -> None:
    async def run() -> None:
        simulator = staged(2)
        await send(simulator, 1)
        await send(simulator, 3)
        assert sorted(running(simulator)) == [1, 2], "of four in flight two are one's part"
        assert simulator.model_queue.pending == 1

    run_scenario(run)


def test_a_batch_has_no_more_rows_than_ever() -> None:
    async def run() -> None:
        simulator = staged(2)
        await send(simulator, 6, rows=5)
        assert running(simulator) == [1, 1]
        assert reasons(simulator) == ["full", "full"]

    run_scenario(run)


@pytest.mark.parametrize("text", ["max_queue_delay_microseconds: 1", "preferred_batch_size: 6"])
def test_configured_batch_sizes_are_kept(text: str) -> None:
    async def run() -> None:
        simulator = staged(2, text)
        await send(simulator, 6)
        simulator.clock.advance(10_000)
        await simulator.settle()
        assert sorted(running(simulator)) == [0, 6]

    run_scenario(run)


def test_the_size_of_all_is_no_preference() -> None:
    """It is put into every config that has no other."""

    async def run() -> None:
        simulator = staged(2, "preferred_batch_size: 8")
        await send(simulator, 6)
        assert running(simulator) == [3, 3]

    run_scenario(run)


def test_short_executions_are_not_worth_it() -> None:
    async def run() -> None:
        simulator = staged(2, took_ns=LONG_NS - 1)
        await send(simulator, 6)
        assert sorted(running(simulator)) == [0, 6]

    run_scenario(run)


def test_there_are_no_more_parts_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "available_cores", lambda: 2)

    async def run() -> None:
        simulator = staged(4)
        await send(simulator, 8)
        assert sorted(running(simulator)) == [0, 0, 4, 4]

    run_scenario(run)


def test_an_instance_that_takes_several_calls_at_once_counts_as_many() -> None:
    async def run() -> None:
        simulator = staged(1)
        simulator.model_queue.sources[0].calls_at_once = 2
        await send(simulator, 6)
        assert running(simulator) == [3]
        assert simulator.model_queue.pending == 3

    run_scenario(run)


def test_a_gpu_is_not_divided() -> None:
    async def run() -> None:
        simulator = staged(2)
        scheduler = simulator.model_queue.scheduler
        for _ in range(6):
            simulator.send()
        assert len(scheduler.next(InstanceInfo("m_0", Device("gpu")), 0)) == 6  # type: ignore[arg-type]
        assert len(scheduler.next(InstanceInfo("m_0", Device("cpu")), 0)) == 3  # type: ignore[arg-type]
        simulator.model_queue.sources[0].calls_at_once = 2  # unless one instance on it takes several calls
        assert len(scheduler.next(InstanceInfo("m_0", Device("gpu")), 0)) == 2  # type: ignore[arg-type]
        await simulator.settle()

    run_scenario(run)


def test_the_last_remaining_instance_gets_all_requests() -> None:
    async def run() -> None:
        simulator = staged(1)
        (source,) = simulator.model_queue.sources
        for _ in range(6):
            simulator.send()
        simulator.model_queue.replace_instances([], [source])
        assert len(simulator.model_queue.scheduler.next(source.instance, 0)) == 6  # type: ignore[arg-type]

    run_scenario(run)
