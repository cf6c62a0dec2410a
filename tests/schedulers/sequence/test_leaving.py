"""Instances that come and go while sequences are under way: one stays on its instance until it ends."""

from __future__ import annotations

import random

import pytest

from headrace import InferResponse
from headrace_testing.stage import play

from .conftest import MS, Theatre, is_answered

IDLE = "max_sequence_idle_microseconds: 5000"
STRATEGIES = [f"direct {{ }} {IDLE}", f"oldest {{ max_candidate_sequences: 2 }} {IDLE}"]


@pytest.mark.parametrize("batching", STRATEGIES)
def test_sequences_under_way_end_on_the_instance_that_leaves_and_others_begin_elsewhere(batching: str) -> None:
    async def scene() -> None:
        stage = Theatre(batching, rows=1, instances=2)
        stage.ask("1S", "2S")
        assert await stage.step() == [["1S"], ["2S"]]
        left = stage.dismiss(stage.instances[0])
        await stage.settle()
        stage.ask("1", "3S" if "oldest" in batching else "2", "2E")
        await stage.step()
        await stage.settle()
        assert not left.done()  # sequence 1 is bound to it
        stage.enter()
        for name in ("4", "5", "6"):
            stage.ask(f"{name}SE")
        stage.ask("1E")
        while not left.done():
            await stage.step()
            await stage.settle()
        await stage.run(10 * MS)
        names = [stage.names[ticket] for ticket in stage.instances[0].given]
        assert names == ["1S", "1", "1E"]
        assert all(is_answered(stage, ticket) for ticket in stage.tickets)

    play(scene)


def test_a_sequence_that_is_idle_for_too_long_keeps_its_instance_no_longer() -> None:
    async def scene() -> None:
        stage = Theatre(STRATEGIES[0], rows=1, instances=2)
        stage.ask("1S")
        await stage.step()
        left = stage.dismiss(stage.instances[0])
        await stage.turn(4 * MS)
        assert not left.done()
        await stage.turn(2 * MS)
        assert left.done()

    play(scene)


def test_those_in_the_backlog_begin_on_an_instance_that_comes() -> None:
    async def scene() -> None:
        stage = Theatre(STRATEGIES[0], rows=1)
        stage.ask("1S", "2SE", "3SE")
        assert await stage.shown() == [["1S"]]
        stage.enter()
        await stage.settle()
        assert await stage.step() == [["1S"], ["2SE"]]
        assert await stage.shown() == [[], ["3SE"]]

    play(scene)


@pytest.mark.parametrize("batching", STRATEGIES)
@pytest.mark.parametrize("seed", range(4))
def test_whoever_comes_and_goes_each_sequence_runs_in_order_on_one_instance(batching: str, seed: int) -> None:
    pick = random.Random(seed)

    async def scene() -> None:
        stage = Theatre(batching.replace(IDLE, "max_sequence_idle_microseconds: 60000000"), rows=2, instances=2)
        left, serving, opened = [], list(stage.instances), dict[int, int]()
        for number in range(1, 60):
            stage.ask(f"{number}S")
            opened[number] = 0
            for name in pick.sample(sorted(opened), pick.randint(0, len(opened))):
                stage.ask(f"{name}E" if pick.random() < 0.4 else f"{name}")
                if stage.names[stage.tickets[-1]].endswith("E"):
                    del opened[name]
            if pick.random() < 0.3 and len(serving) > 1:
                left.append(stage.dismiss(serving.pop(pick.randrange(len(serving)))))
            elif pick.random() < 0.3:
                serving.append(stage.enter())
            await stage.step()
            await stage.settle()
        stage.ask(*(f"{name}E" for name in opened))
        await stage.run(1000 * MS)
        await stage.settle()
        assert all(each.done() for each in left)
        places: dict[str, list[int]] = {}
        runs: dict[str, list[str]] = {}
        for number, instance in enumerate(stage.instances):
            for ticket in instance.given:
                if ticket in stage.names:
                    sequence = str(ticket.request.sequence_id)
                    places.setdefault(sequence, []).append(number)
                    runs.setdefault(sequence, []).append(ticket.request.id)
        assert all(len(set(each)) == 1 for each in places.values())
        assert all(each == sorted(each, key=int) for each in runs.values())
        assert sum(map(len, runs.values())) == len(stage.tickets)
        assert all(isinstance(stage.told(ticket)[0], InferResponse) for ticket in stage.tickets)

    play(scene)
