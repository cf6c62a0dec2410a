"""Requests that belong to no sequence, or not to this model: Triton's words."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from headrace import Cancelled, HeadraceError, InvalidArgument, Unavailable, Unsupported
from headrace_testing.simulator import run_scenario

from .conftest import MS, SequenceSimulator, is_answered

TO = "to model 'model' must specify"
NO_START = f"inference request for sequence {{}} {TO} the START flag on the first request of the sequence"


def refused(simulator: SequenceSimulator, *words: str, rows: int = 1, **fields: Any) -> HeadraceError:
    with pytest.raises(HeadraceError) as refusal:
        simulator.send(rows, **fields) if fields else simulator.send_words(*words)
    simulator.violations.clear()  # the simulator records every error except Unavailable
    assert (
        simulator.model_queue.in_flight
        == len([ticket for ticket in simulator.tickets if not simulator.answers_to(ticket)]) - 1
    )
    simulator.tickets.pop()
    return refusal.value


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_a_request_outside_a_sequence_gets_the_error_of_triton(strategy: str) -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(strategy)
        two = refused(simulator, rows=2, sequence_id=1, sequence_start=True)
        assert (type(two), two.message) == (
            InvalidArgument,
            f"inference request {TO} batch-size 1 due to requirements of sequence batcher",
        )
        none = refused(simulator, sequence_id=0, sequence_start=True)
        assert (type(none), none.message) == (
            InvalidArgument,
            f"inference request {TO} a non-zero or non-empty correlation ID",
        )
        unknown = refused(simulator, "5")
        assert (type(unknown), unknown.message) == (InvalidArgument, NO_START.format(5))
        simulator.send_words("5S", "5", "5E")
        assert refused(simulator, "5").message == NO_START.format(5)
        for _ in range(3):
            await simulator.step()
        assert refused(simulator, "5").message == NO_START.format(5)
        assert all(is_answered(simulator, ticket) for ticket in simulator.tickets)

    run_scenario(scenario)


def test_an_id_of_the_wrong_type_starts_no_sequence() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }")
        assert refused(simulator, sequence_id="five").message == NO_START.format("five")
        wrong = refused(simulator, sequence_id="five", sequence_start=True)
        assert (type(wrong), wrong.message) == (
            InvalidArgument,
            "[request id: 0] sequence batching control 'ID' data-type is 'BYTES', but model 'model' expects 'UINT64'",
        )

    run_scenario(scenario)


def test_a_text_id_is_at_most_128_bytes_and_no_number() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("oldest { }", controls="")
        long = refused(simulator, sequence_id="é" * 65, sequence_start=True)
        assert (type(long), long.message) == (
            Unsupported,
            "string correlation ID cannot be longer than 128 characters",
        )
        empty = refused(simulator, sequence_id="", sequence_start=True)
        assert empty.message == f"inference request {TO} a non-zero or non-empty correlation ID"
        simulator.send(sequence_id="é" * 64, sequence_start=True)
        simulator.send(sequence_id="1", sequence_start=True)
        assert refused(simulator, sequence_id=1).message == NO_START.format(1)

    run_scenario(scenario)


def test_a_start_for_a_live_id_is_logged_and_restarts_it(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }")
        first = simulator.send_words("1S", "1", "1S", "1E")
        expected_texts = (
            "sequence 1 for model 'model' has a conflict. The previous sequence did not end before this sequence start."
        )
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert warning.getMessage() == f"{expected_texts} Previous sequence will be terminated early."
        assert [await simulator.step() for _ in range(4)] == [[["1S"]], [["1"]], [["1S"]], [["1E"]]]
        assert all(is_answered(simulator, ticket) for ticket in first)

    run_scenario(scenario)


def test_a_stopping_model_refuses_requests_and_runs_accepted_ones() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }")
        simulator.send_words("1S", "1E")
        draining = asyncio.ensure_future(simulator.model_queue.drain())
        await simulator.settle()
        with pytest.raises(Unavailable, match="Server is stopping, scheduler for model has stopped accepting new"):
            simulator.send_words("2S")
        simulator.tickets.pop()
        assert [await simulator.step() for _ in range(2)] == [[["1S"]], [["1E"]]]
        await draining

    run_scenario(scenario)


def test_a_timeout_in_the_backlog_rejects_the_whole_sequence_and_no_other() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }", rows=1)
        seated = simulator.send_words("1S", "1", timeout_us=5000)
        late = simulator.send_words("2S", "2E")
        late += simulator.send_words("3S")
        late[2:] += simulator.send_words("3", timeout_us=4000)
        other = simulator.send_words("4S")
        await simulator.advance(4 * MS - 1)
        assert not any(simulator.answers_to(ticket) for ticket in simulator.tickets)
        await simulator.advance(1)
        for ticket in late[2:]:
            (error,) = simulator.answers_to(ticket)
            assert isinstance(error, Unavailable)
            assert error.message == "timeout of the corresponding sequence has been expired"
        assert refused(simulator, "3").message == NO_START.format(3)
        await simulator.advance(100 * MS)
        assert not any(simulator.answers_to(ticket) for ticket in (*seated, *late[:2], *other))
        assert simulator.statistics.snapshot().rejected.count == 2
        seated += simulator.send_words("1E")
        steps = [(await simulator.step())[0][0] for _ in range(6)]
        assert steps == ["1S", "1", "1E", "2S", "2E", "4S"]
        assert all(is_answered(simulator, ticket) for ticket in (*seated, *late[:2], *other))

    run_scenario(scenario)


@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 1 }"])
def test_cancelling_a_request_cancels_its_sequence_and_frees_its_slot(strategy: str, left: int) -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(strategy, rows=1)
        busy = simulator.send_words("9S")
        await simulator.settle()
        busy += simulator.send_words("9")
        waiting = simulator.send_words("1S", "1", "1E")
        (next_one,) = simulator.send_words("2SE")
        waiting[left].cancel()
        for ticket in waiting:
            assert [type(answer) for answer in simulator.answers_to(ticket)] == [Cancelled]
        assert simulator.statistics.snapshot().cancelled.count == 3
        busy[1].cancel()
        assert [type(answer) for answer in simulator.answers_to(busy[1])] == [Cancelled]
        assert refused(simulator, "9").message == NO_START.format(9)
        assert await simulator.step() == [["9S"]]
        assert await simulator.step() == [["2SE"]]
        assert is_answered(simulator, next_one)
        assert is_answered(simulator, busy[0])
        assert simulator.model_queue.pending == simulator.model_queue.in_flight == 0

    run_scenario(scenario)


def test_cancelling_a_running_request_cancels_the_waiting_ones_of_its_sequence() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }")
        running, waiting, other = simulator.send_words("1S", "1", "2S")
        assert await simulator.running() == [["1S", "2S"]]
        running.cancel()
        assert not simulator.answers_to(waiting)
        await simulator.step()
        assert [type(answer) for answer in simulator.answers_to(waiting)] == [Cancelled]
        assert refused(simulator, "1").message == NO_START.format(1)
        assert is_answered(simulator, other)

    run_scenario(scenario)


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_during_a_drain_started_sequences_may_end_and_none_may_start(strategy: str) -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(strategy)
        simulator.send_words("1S")
        await simulator.running()
        draining = asyncio.ensure_future(simulator.model_queue.drain())
        await simulator.settle()
        none = refused(simulator, "2S")
        assert type(none) is Unavailable
        assert none.message == (
            "[request id: 1] Server is stopping, scheduler for model has stopped accepting new inference requests"
        )
        assert refused(simulator, "2").message == NO_START.format(2)
        simulator.send_words("1", "1E")
        assert not draining.done()
        assert [await simulator.step() for _ in range(3)] == [[["1S"]], [["1"]], [["1E"]]]
        await draining
        assert all(is_answered(simulator, ticket) for ticket in simulator.tickets)

    run_scenario(scenario)
