"""The dynamic batcher on a clock that is turned, beside the simulation that the benchmark compares it with.

The simulation is written from docs/spec/behaviours.md section 6.2, and shares no code with the batcher.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from headrace.config.model_config_pb2 import ModelConfig
from headrace.schedulers.dynamic import DynamicScheduler
from headrace_testing.simulator import SchedulerSimulator, run_scenario

MOST = 8
MS = 1_000_000


def load_oracle() -> Any:
    path = Path(__file__).parents[3] / "benchmarks" / "batching_oracle.py"
    spec = importlib.util.spec_from_file_location("batching_oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up the types of their fields
    spec.loader.exec_module(module)
    return module


ORACLE = load_oracle()


def execution_ns(rows: int) -> int:
    return MS + 217_331 * rows


async def ran(config: ModelConfig, arrivals_ns: list[int], instances: int) -> list[tuple[int, list[int]]]:
    """Return the begin of each batch that the server's model queue ran, and its requests by number."""
    simulator = SchedulerSimulator(DynamicScheduler, config, instances)
    simulator.poll_instances()
    begin_ns = simulator.clock.now_ns()
    busy: dict[int, int] = {}
    batches: list[tuple[int, list[int]]] = []
    coming = 0
    while coming < len(arrivals_ns) or busy or simulator.model_queue.in_flight:
        events = [*busy.values(), *arrivals_ns[coming : coming + 1]]
        if simulator.clock.next_ns is not None:
            events.append(simulator.clock.next_ns - begin_ns)
        now_ns = min(events)
        simulator.clock.advance(begin_ns + now_ns - simulator.clock.now_ns())
        for number in [number for number, end_ns in busy.items() if end_ns <= now_ns]:
            del busy[number]
            simulator.instances[number].finish()
        while coming < len(arrivals_ns) and arrivals_ns[coming] <= now_ns:
            simulator.send()
            coming += 1
        await simulator.settle()
        for number, instance in enumerate(simulator.instances):
            if instance.batch and number not in busy:
                batches.append((now_ns, [int(ticket.request.id) for ticket in instance.batch]))
                busy[number] = now_ns + execution_ns(len(instance.batch))
    simulator.check()
    return batches


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("preferred", [(), (4,), (2, 6)])
@pytest.mark.parametrize("delay_us", [0, 2000])
def test_the_batcher_forms_the_batches_that_the_rules_say(
    delay_us: int, preferred: tuple[int, ...], instances: int, seed: int
) -> None:
    rates = random.Random(seed)
    arrivals_ns, now_ns = list[int](), 0
    for number in range(300):  # a quiet stretch, and one with more than the instances can do
        now_ns += 1 + int(rates.expovariate(1.0) * (MS if number % 100 < 50 else MS // 5))
        arrivals_ns.append(now_ns)
    rule = f"max_queue_delay_microseconds: {delay_us} preferred_batch_size: {list(preferred or (MOST,))}"
    config = text_format.Parse(f'name: "m" max_batch_size: {MOST} dynamic_batching {{ {rule} }}', ModelConfig())
    policy = ORACLE.Policy(MOST, delay_us * 1000, frozenset(preferred), instances)
    wanted = ORACLE.simulate(arrivals_ns, policy, execution_ns)

    async def scenario() -> None:
        assert await ran(config, arrivals_ns, instances) == [*zip(wanted.began_ns, wanted.batches, strict=True)]

    run_scenario(scenario)
    assert sorted(wanted.waits_ns) == list(range(300))
