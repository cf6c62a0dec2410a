"""Batches and slots of requests: the schedules of Triton's documentation and of its source."""

from __future__ import annotations

import numpy as np
import pytest

from headrace import Cancelled, InvalidArgument
from headrace.telemetry.published import read_metrics
from headrace_testing.simulator import run_scenario

from .conftest import MS, SequenceSimulator, flags_of, is_answered

IDLE = "max_sequence_idle_microseconds: 5000000"


def test_direct_schedules_as_triton_documents() -> None:
    """Two instances of two slots. Sequences 0 to 5 start in this order, so 4 and 5 wait for a slot."""

    async def scenario() -> None:
        simulator = SequenceSimulator(f"direct {{ }} {IDLE}", rows=2, instances=2)
        simulator.send_words("10S", "11S", "12S", "13S", "14S", "15S")
        simulator.send_words("10", "10E", "11E", "12", "12E", "13", "13", "13E", "14E", "15", "15E")
        steps = [await simulator.step() for _ in range(6)]
        assert steps == [
            [["10S", "12S"], ["11S", "13S"]],
            [["10", "12"], ["11E", "13"]],
            [["10E", "12E"], ["14S", "13"]],
            [["15S"], ["14E", "13E"]],
            [["15"], []],
            [["15E"], []],
        ]
        assert all(is_answered(simulator, ticket) for ticket in simulator.tickets)

    run_scenario(scenario)


def test_direct_sets_the_controls_of_each_slot_as_triton_documents() -> None:
    """The figure of START and READY: a request alone, then two close together, then one in the second slot alone."""

    async def scenario() -> None:
        simulator = SequenceSimulator(f"direct {{ }} {IDLE}", rows=2)
        simulator.send_words("7S")
        await simulator.settle()
        assert flags_of(simulator.instances[0].batch) == [(1, 1, 0, 7)]
        simulator.instances[0].finish()
        assert await simulator.running() == [[]]
        simulator.send_words("7", "8S")
        await simulator.settle()
        assert flags_of(simulator.instances[0].batch) == [(1, 0, 0, 7), (1, 1, 0, 8)]
        simulator.send_words("8")
        await simulator.step()
        await simulator.settle()
        assert flags_of(simulator.instances[0].batch) == [(0, 0, 0, 0), (1, 0, 0, 8)]
        empty, _ = simulator.instances[0].batch
        np.testing.assert_array_equal(np.asarray(empty.request.inputs["x"]), [[0]])
        simulator.send_words("7E", "8E")
        await simulator.step()
        await simulator.settle()
        assert flags_of(simulator.instances[0].batch) == [(1, 0, 1, 7), (1, 0, 1, 8)]
        await simulator.step()
        simulator.send_words("9SE")
        await simulator.settle()
        assert flags_of(simulator.instances[0].batch) == [(1, 1, 1, 9)]

    run_scenario(scenario)


def test_oldest_schedules_as_triton_documents() -> None:
    """Four candidates, batches of two; A to D begin in this order, and D has two more than the others."""

    async def scenario() -> None:
        simulator = SequenceSimulator(f"oldest {{ max_candidate_sequences: 4 }} {IDLE}", rows=2)
        for words in (("1S", "2S", "3S", "4S"), ("1", "2", "3", "4"), ("1E", "2E", "3E", "4")):
            simulator.send_words(*words)
        simulator.send_words("4", "4E", "5SE")
        steps = [(await simulator.step())[0] for _ in range(8)]
        assert steps == [
            ["1S", "2S"],
            ["3S", "4S"],
            ["1", "2"],
            ["3", "4"],
            ["1E", "2E"],
            ["3E", "4"],
            ["5SE", "4"],  # 5 has waited for a slot, which 1 has left
            ["4E"],
        ]

    run_scenario(scenario)


def test_a_request_whose_inputs_differ_in_shape_waits_for_the_next_batch() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }", rows=3)
        for number, key in ((1, "a"), (2, "b"), (3, "a")):
            simulator.names[simulator.send(1, key, sequence_id=number, sequence_start=True)] = str(number)
        assert [await simulator.step() for _ in range(2)] == [[["1", "-", "3"]], [["-", "2"]]]
        assert all(is_answered(simulator, ticket) for ticket in simulator.tickets)

    run_scenario(scenario)


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
def test_requests_of_one_sequence_never_run_together(strategy: str) -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(strategy, rows=4)
        simulator.send_words("1S", "1", "1", "1E")
        assert [await simulator.step() for _ in range(5)] == [[["1S"]], [["1"]], [["1"]], [["1E"]], [[]]]

    run_scenario(scenario)


def test_direct_waits_for_the_utilization_up_to_the_delay() -> None:
    async def scenario() -> None:
        delayed = "direct { max_queue_delay_microseconds: 3000 minimum_slot_utilization: 0.75 }"
        simulator = SequenceSimulator(delayed, rows=4)
        simulator.send_words("1S", "2S")
        assert await simulator.running() == [[]]
        simulator.send_words("3S")
        assert await simulator.step() == [["1S", "2S", "3S"]]
        simulator.send_words("1", "1", "2")
        await simulator.advance(3 * MS - 1)
        assert await simulator.running() == [[]]
        await simulator.advance(1)
        assert await simulator.step() == [["1", "2"]]
        assert await simulator.step() == [["1"]]  # it has waited for as long

    run_scenario(scenario)


def test_oldest_counts_the_delay_from_when_a_request_could_have_run() -> None:
    async def scenario() -> None:
        delayed = """oldest {
            max_candidate_sequences: 4 preferred_batch_size: [2, 3] max_queue_delay_microseconds: 3000 }"""
        simulator = SequenceSimulator(delayed, rows=4)
        simulator.send_words("1S", "1")
        await simulator.advance(3 * MS - 1)
        assert await simulator.running() == [[]]
        await simulator.advance(1)
        assert await simulator.running() == [["1S"]]
        await simulator.advance(MS)
        simulator.instances[0].finish()
        assert await simulator.running() == [[]]
        await simulator.advance(2 * MS)
        simulator.send_words("2S")
        assert await simulator.step() == [["1", "2S"]]
        simulator.send_words("1E", "2E", "3SE")
        assert await simulator.step() == [["1E", "2E", "3SE"]]

    run_scenario(scenario)


def test_an_idle_sequence_ends_to_the_microsecond_and_the_backlog_gets_its_slot() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(f"direct {{ }} {IDLE}", rows=1)
        simulator.send_words("1S")
        waiting = simulator.send_words("2S", "2")
        await simulator.advance(60_000 * MS)  # what runs is not idle, and the backlog never is
        assert await simulator.step() == [["1S"]]
        await simulator.advance(4000 * MS)
        simulator.send_words("1")
        assert await simulator.step() == [["1"]]
        await simulator.advance(5000 * MS - 1)
        assert await simulator.running() == [[]]
        simulator.send_words("1")
        assert await simulator.step() == [["1"]]
        await simulator.advance(5000 * MS)
        assert [await simulator.step() for _ in range(2)] == [[["2S"]], [["2"]]]
        assert all(is_answered(simulator, ticket) for ticket in waiting)
        with pytest.raises(InvalidArgument, match="sequence 1 to model 'model' must specify the START flag"):
            simulator.send_words("1")
        simulator.tickets.pop()
        simulator.violations.clear()
        simulator.send_words("1S")
        await simulator.advance(5000 * MS)
        assert await simulator.step() == [["1S"]]
        await simulator.advance(5000 * MS)
        assert simulator.clock.pending == 0
        assert simulator.model_queue.in_flight == 0

    run_scenario(scenario)


def test_the_metrics_count_active_waiting_and_idle_sequences() -> None:
    def measured(simulator: SequenceSimulator) -> list[object]:
        return [value for _, value in read_metrics(simulator.model_queue.full_scheduler)]

    async def scenario() -> None:
        simulator = SequenceSimulator("direct {} max_sequence_idle_microseconds: 1000", rows=2)
        assert measured(simulator) == [0, 0, 0]
        simulator.send_words("1S", "2S", "3S", "4S")
        await simulator.settle()
        assert measured(simulator) == [2, 2, 0]
        await simulator.step()
        await simulator.advance(MS)  # 1 and 2 have been idle
        assert measured(simulator) == [2, 0, 2]
        await simulator.step()
        simulator.send_words("3E", "4E")
        await simulator.step()
        await simulator.step()
        assert measured(simulator) == [0, 0, 2]

    run_scenario(scenario)


def test_an_ended_id_may_restart_while_its_last_request_waits() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }", rows=2)
        simulator.send_words("1S", "1E", "1S", "1", "1E")
        assert [await simulator.step() for _ in range(3)] == [[["1S", "1S"]], [["1E", "1"]], [["-", "1E"]]]

    run_scenario(scenario)


def test_the_last_answer_of_a_cancelled_sequence_does_not_end_the_next_in_its_slot() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("oldest { max_candidate_sequences: 1 }", rows=1)
        cancelled, waiting = simulator.send_words("1S", "1")
        await simulator.settle()
        others = simulator.send_words("2S", "2E")
        waiting.cancel()
        assert [type(answer) for answer in simulator.answers_to(waiting)] == [Cancelled]
        simulator.send_words("1S", "1E")
        assert [(await simulator.step())[0][0] for _ in range(5)] == ["1S", "2S", "2E", "1S", "1E"]
        assert all(is_answered(simulator, ticket) for ticket in (cancelled, *others))

    run_scenario(scenario)


def test_an_unloaded_model_has_no_timer() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }")
        simulator.send_words("1S")
        await simulator.step()
        assert simulator.clock.pending == 1
        simulator.model_queue.close()
        assert simulator.clock.pending == 0

    run_scenario(scenario)


def test_oldest_waits_for_the_answer_of_a_sequence_also_with_concurrent_calls() -> None:
    """A model may answer later, from another thread."""

    async def scenario() -> None:
        simulator = SequenceSimulator("oldest { max_candidate_sequences: 2 }", rows=1)
        simulator.send_words("1S", "1", "2S")
        assert await simulator.running() == [["1S"]]
        instance = simulator.instances[0]
        batch, instance.batch = instance.batch, []
        instance.poll()
        assert await simulator.step() == [["2S"]]
        assert await simulator.running() == [[]]
        instance.batch = batch
        assert [await simulator.step() for _ in range(2)] == [[["1S"]], [["1"]]]

    run_scenario(scenario)


def test_oldest_with_preserve_ordering_runs_one_batch_per_instance_at_a_time() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("oldest { max_candidate_sequences: 3 preserve_ordering: true }", rows=1)
        first, second = simulator.send_words("1S", "2S")
        assert await simulator.running() == [["1S"]]
        instance = simulator.instances[0]
        batch, instance.batch = instance.batch, []  # as a model that answers later, from another thread
        instance.poll()
        assert await simulator.running() == [[]]
        assert not simulator.answers_to(first)
        instance.batch = batch
        assert [await simulator.step() for _ in range(2)] == [[["1S"]], [["2S"]]]
        assert is_answered(simulator, second)

    run_scenario(scenario)
