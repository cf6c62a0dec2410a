"""The examples in Triton's documentation of its dynamic batcher (docs/user_guide/batcher.md) as traces: arrivals, and
batches with their times. Written from its text, not from the results of this batcher."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from google.protobuf import text_format

from headrace.config.model_config_pb2 import ModelConfig
from headrace.schedulers.dynamic import DynamicScheduler
from headrace_testing.simulator import SchedulerSimulator, run_scenario

US = 1000
#: Arrivals: the time in microseconds, and the number of requests of one row. Batches: the time, and the rows.
Trace = Sequence[tuple[int, int]]


async def traced(simulator: SchedulerSimulator, arrivals: Trace) -> list[tuple[int, int]]:
    """The batches of the one instance, which takes no time, and when each ran."""
    shown: list[tuple[int, int]] = []
    (instance,) = simulator.instances
    came = dict(arrivals)
    for now_us in range(max(came) + 201):
        for _ in range(came.get(now_us, 0)):
            simulator.send()
        await simulator.settle()
        while instance.batch:
            shown.append((now_us, len(instance.batch)))
            instance.finish()
            await simulator.settle()
        await simulator.advance(US)
    return shown


def staged(batching: str) -> SchedulerSimulator:
    simulator = SchedulerSimulator(
        DynamicScheduler,
        text_format.Parse(f'name: "m" max_batch_size: 8 dynamic_batching {{ {batching} }}', ModelConfig()),
        1,
    )
    simulator.poll_instances()
    return simulator


@pytest.mark.parametrize(
    ("waiting", "batches"), [(3, [3]), (4, [4]), (7, [4, 3]), (8, [8]), (11, [8, 3]), (12, [8, 4]), (15, [8, 4, 3])]
)
def test_an_instance_that_becomes_available_gets_the_largest_preferred_size_that_waits(
    waiting: int, batches: list[int]
) -> None:
    """``preferred_batch_size: [ 4, 8 ]``"""

    async def scenario() -> None:
        simulator = staged("preferred_batch_size: [ 4, 8 ]")
        (instance,) = simulator.instances
        simulator.send()
        await simulator.settle()
        assert len(instance.batch) == 1
        for _ in range(waiting):
            simulator.send()
        await simulator.settle()
        shown = []
        while instance.batch:
            instance.finish()
            await simulator.settle()
            shown.append(len(instance.batch))
        assert shown == [*batches, 0]

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("arrivals", "batches"),
    [
        ([(0, 8)], [(0, 8)]),  # a batch of the maximum size waits for nothing
        ([(0, 3)], [(100, 3)]),  # the delay expires: it is sent as it is
        ([(0, 3), (60, 2)], [(100, 5)]),  # no request is delayed longer, in any order of arrival
        ([(0, 3), (60, 5)], [(60, 8)]),  # a new one allows the maximum: sent immediately
        ([(0, 3), (60, 6)], [(60, 8), (160, 1)]),
    ],
)
def test_a_batch_below_the_maximum_is_delayed_for_the_configured_time(arrivals: Trace, batches: Trace) -> None:
    """``max_queue_delay_microseconds: 100``"""

    async def scenario() -> None:
        assert await traced(staged("max_queue_delay_microseconds: 100"), arrivals) == batches

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("arrivals", "batches"),
    [
        ([(0, 3), (50, 1)], [(50, 4)]),
        ([(0, 4)], [(0, 4)]),
        ([(0, 2)], [(100, 2)]),
        ([(0, 5), (20, 1)], [(0, 4), (100, 2)]),
    ],
)
def test_a_preferred_size_runs_at_once_and_any_other_size_is_delayed(arrivals: Trace, batches: Trace) -> None:
    async def scenario() -> None:
        simulator = staged("preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100")
        assert await traced(simulator, arrivals) == batches

    run_scenario(scenario)
