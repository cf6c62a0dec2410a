"""The examples of Triton's documentation of its sequence batcher (docs/user_guide/architecture.md), as traces.

They have the documented models, and check the slot, the batch and the controls of each request.
"""

from __future__ import annotations

import numpy as np

from headrace import Ticket
from headrace_testing.simulator import run_scenario

from .conftest import SequenceSimulator, inputs_of

IDLE = "max_sequence_idle_microseconds: 5000000"
START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }'
READY = 'control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] } }'
END = 'control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] } }'
CORRID = 'control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }'


def direct() -> SequenceSimulator:
    """``direct_stateful_model``: two instances of two slots."""
    return SequenceSimulator(f"{IDLE} direct {{ }}", rows=2, instances=2, controls=START + READY)


def control(batch: list[Ticket], name: str) -> list[float]:
    return [float(np.asarray(inputs_of(ticket)[name]).item()) for ticket in batch]


def test_direct_gives_four_sequences_a_slot_and_a_freed_one_to_the_backlog() -> None:
    async def scenario() -> None:
        simulator = direct()
        for word in ("1S", "2S", "3S", "4S", "5S", "6S"):  # the first of each before any later one
            simulator.send_words(word)
        simulator.send_words("1", "1E", "2E", "3", "3", "3E", "4E", "5E", "6E")
        at: dict[int, list[tuple[int, int, int]]] = {}
        for step in range(4):
            for number, batch in enumerate(await simulator.step()):
                for slot, name in enumerate(batch):
                    if name != "-":
                        at.setdefault(int(name.rstrip("SE")), []).append((step, number, slot))
        places = {sequence: {(number, slot) for _, number, slot in steps} for sequence, steps in at.items()}
        assert all(len(where) == 1 for where in places.values())  # one slot for all of a sequence
        first_four = set().union(*(places[sequence] for sequence in (1, 2, 3, 4)))
        assert len(first_four) == 4  # all that there are
        assert [[step for step, *_ in at[sequence]] for sequence in (1, 2, 3, 4)] == [
            [0, 1, 2], [0, 1], [0, 1, 2, 3], [0, 1],
        ]  # fmt: skip
        # 2 and 4 end first, and waiting sequences get their slots in the next batch.
        assert {*places[5], *places[6]} == {*places[2], *places[4]}
        assert [[step for step, *_ in at[sequence]] for sequence in (5, 6)] == [[2, 3], [2, 3]]

    run_scenario(scenario)


def test_direct_sets_start_and_ready_of_each_slot() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(f"{IDLE} direct {{ }}", rows=2, controls=START + READY)
        (instance,) = simulator.instances
        simulator.send_words("1S")
        assert await simulator.running() == [["1S"]]  # at once, and slot 1 is not ready
        assert (control(instance.batch, "START"), control(instance.batch, "READY")) == ([1], [1])
        await simulator.step()
        assert await simulator.running() == [[]]  # the instance sits idle
        simulator.send_words("1", "2S")
        assert await simulator.running() == [["1", "2S"]]
        assert (control(instance.batch, "START"), control(instance.batch, "READY")) == ([0, 1], [1, 1])
        await simulator.step()
        simulator.send_words("2")
        assert await simulator.running() == [["-", "2"]]
        assert (control(instance.batch, "START"), control(instance.batch, "READY")) == ([0, 0], [0, 1])

    run_scenario(scenario)


def test_oldest_forms_batches_of_the_oldest_and_never_has_two_of_one_sequence() -> None:
    """``oldest_stateful_model``: four candidates, in batches of two. All arrive at the same rate, A just before B."""

    async def scenario() -> None:
        simulator = SequenceSimulator(
            f"{IDLE} oldest {{ max_candidate_sequences: 4 }}", rows=2, controls=START + END + CORRID
        )
        (instance,) = simulator.instances
        simulator.send_words("1S", "2S", "3S", "4S")
        simulator.send_words("1", "2E", "3E", "4")
        simulator.send_words("1E", "4E")
        batches_seen, controls = [], []
        while (batches := await simulator.running()) != [[]]:
            batches_seen += batches
            controls.append([control(instance.batch, name) for name in ("START", "END", "CORRID")])
            await simulator.step()
        assert batches_seen == [["1S", "2S"], ["3S", "4S"], ["1", "2E"], ["3E", "4"], ["1E", "4E"]]
        assert controls == [
            [[1, 1], [0, 0], [1, 2]],
            [[1, 1], [0, 0], [3, 4]],
            [[0, 0], [0, 1], [1, 2]],
            [[0, 0], [1, 0], [3, 4]],
            [[0, 0], [1, 1], [1, 4]],
        ]

    run_scenario(scenario)


def test_two_requests_of_one_sequence_are_never_batched_together() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(f"{IDLE} oldest {{ max_candidate_sequences: 4 }}", rows=2, controls=CORRID)
        simulator.send_words("1S", "2S", "1E", "4S", "2E", "4", "4E")
        assert [(await simulator.step())[0] for _ in range(5)] == [["1S", "2S"], ["4S", "1E"], ["2E", "4"], ["4E"], []]

    run_scenario(scenario)
