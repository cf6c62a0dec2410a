"""Instances that are replaced during sequences: a sequence stays on its instance until it ends."""

from __future__ import annotations

import random

import pytest

from headrace import InferResponse
from headrace_testing.simulator import run_scenario

from .conftest import MS, SequenceSimulator, is_answered

IDLE = "max_sequence_idle_microseconds: 5000"
STRATEGIES = [f"direct {{ }} {IDLE}", f"oldest {{ max_candidate_sequences: 2 }} {IDLE}"]


@pytest.mark.parametrize("batching", STRATEGIES)
def test_running_sequences_end_on_the_removed_instance_and_new_ones_start_elsewhere(batching: str) -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(batching, rows=1, instances=2)
        simulator.send_words("1S", "2S")
        assert await simulator.step() == [["1S"], ["2S"]]
        left = simulator.remove_instance(simulator.instances[0])
        await simulator.settle()
        simulator.send_words("1", "3S" if "oldest" in batching else "2", "2E")
        await simulator.step()
        await simulator.settle()
        assert not left.done()  # sequence 1 is bound to it
        simulator.add_instance()
        for name in ("4", "5", "6"):
            simulator.send_words(f"{name}SE")
        simulator.send_words("1E")
        while not left.done():
            await simulator.step()
            await simulator.settle()
        await simulator.run(10 * MS)
        names = [simulator.names[ticket] for ticket in simulator.instances[0].received]
        assert names == ["1S", "1", "1E"]
        assert all(is_answered(simulator, ticket) for ticket in simulator.tickets)

    run_scenario(scenario)


def test_an_idle_sequence_frees_its_slot() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(STRATEGIES[0], rows=1, instances=2)
        simulator.send_words("1S")
        await simulator.step()
        left = simulator.remove_instance(simulator.instances[0])
        await simulator.advance(4 * MS)
        assert not left.done()
        await simulator.advance(2 * MS)
        assert left.done()

    run_scenario(scenario)


def test_the_backlog_starts_on_a_new_instance() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(STRATEGIES[0], rows=1)
        simulator.send_words("1S", "2SE", "3SE")
        assert await simulator.running() == [["1S"]]
        simulator.add_instance()
        await simulator.settle()
        assert await simulator.step() == [["1S"], ["2SE"]]
        assert await simulator.running() == [[], ["3SE"]]

    run_scenario(scenario)


@pytest.mark.parametrize("batching", STRATEGIES)
@pytest.mark.parametrize("seed", range(4))
def test_each_sequence_runs_in_order_on_one_instance(batching: str, seed: int) -> None:
    pick = random.Random(seed)

    async def scenario() -> None:
        simulator = SequenceSimulator(
            batching.replace(IDLE, "max_sequence_idle_microseconds: 60000000"), rows=2, instances=2
        )
        left, serving, opened = [], list(simulator.instances), dict[int, int]()
        for number in range(1, 60):
            simulator.send_words(f"{number}S")
            opened[number] = 0
            for name in pick.sample(sorted(opened), pick.randint(0, len(opened))):
                simulator.send_words(f"{name}E" if pick.random() < 0.4 else f"{name}")
                if simulator.names[simulator.tickets[-1]].endswith("E"):
                    del opened[name]
            if pick.random() < 0.3 and len(serving) > 1:
                left.append(simulator.remove_instance(serving.pop(pick.randrange(len(serving)))))
            elif pick.random() < 0.3:
                serving.append(simulator.add_instance())
            await simulator.step()
            await simulator.settle()
        simulator.send_words(*(f"{name}E" for name in opened))
        await simulator.run(1000 * MS)
        await simulator.settle()
        assert all(each.done() for each in left)
        places: dict[str, list[int]] = {}
        runs: dict[str, list[str]] = {}
        for number, instance in enumerate(simulator.instances):
            for ticket in instance.received:
                if ticket in simulator.names:
                    sequence = str(ticket.request.sequence_id)
                    places.setdefault(sequence, []).append(number)
                    runs.setdefault(sequence, []).append(ticket.request.id)
        assert all(len(set(each)) == 1 for each in places.values())
        assert all(each == sorted(each, key=int) for each in runs.values())
        assert sum(map(len, runs.values())) == len(simulator.tickets)
        assert all(isinstance(simulator.answers_to(ticket)[0], InferResponse) for ticket in simulator.tickets)

    run_scenario(scenario)
