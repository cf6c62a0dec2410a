"""Requests that belong to no sequence, or not to this model: Triton's words."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from headrace import Cancelled, HeadraceError, InvalidArgument, Unavailable, Unsupported
from headrace_testing.stage import play

from .conftest import MS, Theatre, is_answered

TO = "to model 'model' must specify"
NO_START = f"inference request for sequence {{}} {TO} the START flag on the first request of the sequence"


def refused(stage: Theatre, *words: str, rows: int = 1, **fields: Any) -> HeadraceError:
    with pytest.raises(HeadraceError) as refusal:
        stage.send(rows, **fields) if fields else stage.ask(*words)
    stage.wrong.clear()  # the stage notes all that is raised and is not Unavailable
    assert stage.model_queue.in_flight == len([ticket for ticket in stage.tickets if not stage.told(ticket)]) - 1
    stage.tickets.pop()
    return refusal.value


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_what_is_no_part_of_a_sequence_is_refused_in_the_words_of_triton(strategy: str) -> None:
    async def scene() -> None:
        stage = Theatre(strategy)
        two = refused(stage, rows=2, sequence_id=1, sequence_start=True)
        assert (type(two), two.message) == (
            InvalidArgument,
            f"inference request {TO} batch-size 1 due to requirements of sequence batcher",
        )
        none = refused(stage, sequence_id=0, sequence_start=True)
        assert (type(none), none.message) == (
            InvalidArgument,
            f"inference request {TO} a non-zero or non-empty correlation ID",
        )
        unknown = refused(stage, "5")
        assert (type(unknown), unknown.message) == (InvalidArgument, NO_START.format(5))
        stage.ask("5S", "5", "5E")
        assert refused(stage, "5").message == NO_START.format(5)
        for _ in range(3):
            await stage.step()
        assert refused(stage, "5").message == NO_START.format(5)
        assert all(is_answered(stage, ticket) for ticket in stage.tickets)

    play(scene)


def test_an_id_of_the_wrong_type_begins_no_sequence() -> None:
    async def scene() -> None:
        stage = Theatre("direct { }")
        assert refused(stage, sequence_id="five").message == NO_START.format("five")
        wrong = refused(stage, sequence_id="five", sequence_start=True)
        assert (type(wrong), wrong.message) == (
            InvalidArgument,
            "[request id: 0] sequence batching control 'ID' data-type is 'BYTES', but model 'model' expects 'UINT64'",
        )

    play(scene)


def test_a_text_is_at_most_128_bytes_and_no_number() -> None:
    async def scene() -> None:
        stage = Theatre("oldest { }", controls="")
        long = refused(stage, sequence_id="é" * 65, sequence_start=True)
        assert (type(long), long.message) == (
            Unsupported,
            "string correlation ID cannot be longer than 128 characters",
        )
        empty = refused(stage, sequence_id="", sequence_start=True)
        assert empty.message == f"inference request {TO} a non-zero or non-empty correlation ID"
        stage.send(sequence_id="é" * 64, sequence_start=True)
        stage.send(sequence_id="1", sequence_start=True)
        assert refused(stage, sequence_id=1).message == NO_START.format(1)

    play(scene)


def test_a_start_for_an_id_that_lives_is_warned_of_and_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        stage = Theatre("direct { }")
        first = stage.ask("1S", "1", "1S", "1E")
        said = (
            "sequence 1 for model 'model' has a conflict. The previous sequence did not end before this sequence start."
        )
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert warning.getMessage() == f"{said} Previous sequence will be terminated early."
        assert [await stage.step() for _ in range(4)] == [[["1S"]], [["1"]], [["1S"]], [["1E"]]]
        assert all(is_answered(stage, ticket) for ticket in first)

    play(scene)


def test_a_model_that_stops_takes_no_more_and_runs_what_it_has() -> None:
    async def scene() -> None:
        stage = Theatre("direct { }")
        stage.ask("1S", "1E")
        draining = asyncio.ensure_future(stage.model_queue.drain())
        await stage.settle()
        with pytest.raises(Unavailable, match="Server is stopping, scheduler for model has stopped accepting new"):
            stage.ask("2S")
        stage.tickets.pop()
        assert [await stage.step() for _ in range(2)] == [[["1S"]], [["1E"]]]
        await draining

    play(scene)


def test_a_timeout_in_the_backlog_rejects_the_whole_sequence_and_no_other() -> None:
    async def scene() -> None:
        stage = Theatre("direct { }", rows=1)
        seated = stage.ask("1S", "1", timeout_us=5000)
        late = stage.ask("2S", "2E")
        late += stage.ask("3S")
        late[2:] += stage.ask("3", timeout_us=4000)
        other = stage.ask("4S")
        await stage.turn(4 * MS - 1)
        assert not any(stage.told(ticket) for ticket in stage.tickets)
        await stage.turn(1)
        for ticket in late[2:]:
            (told,) = stage.told(ticket)
            assert isinstance(told, Unavailable)
            assert told.message == "timeout of the corresponding sequence has been expired"
        assert refused(stage, "3").message == NO_START.format(3)
        await stage.turn(100 * MS)
        assert not any(stage.told(ticket) for ticket in (*seated, *late[:2], *other))
        assert stage.statistics.snapshot().rejected.count == 2
        seated += stage.ask("1E")
        steps = [(await stage.step())[0][0] for _ in range(6)]
        assert steps == ["1S", "1", "1E", "2S", "2E", "4S"]
        assert all(is_answered(stage, ticket) for ticket in (*seated, *late[:2], *other))

    play(scene)


@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 1 }"])
def test_who_cancels_one_request_cancels_its_sequence_and_frees_its_slot(strategy: str, left: int) -> None:
    async def scene() -> None:
        stage = Theatre(strategy, rows=1)
        busy = stage.ask("9S")
        await stage.settle()
        busy += stage.ask("9")
        waiting = stage.ask("1S", "1", "1E")
        (next_one,) = stage.ask("2SE")
        waiting[left].cancel()
        for ticket in waiting:
            assert [type(answer) for answer in stage.told(ticket)] == [Cancelled]
        assert stage.statistics.snapshot().cancelled.count == 3
        busy[1].cancel()
        assert [type(answer) for answer in stage.told(busy[1])] == [Cancelled]
        assert refused(stage, "9").message == NO_START.format(9)
        assert await stage.step() == [["9S"]]
        assert await stage.step() == [["2SE"]]
        assert is_answered(stage, next_one)
        assert is_answered(stage, busy[0])
        assert stage.model_queue.pending == stage.model_queue.in_flight == 0

    play(scene)


def test_who_leaves_while_his_request_runs_takes_what_waits_along() -> None:
    async def scene() -> None:
        stage = Theatre("direct { }")
        running, waiting, other = stage.ask("1S", "1", "2S")
        assert await stage.shown() == [["1S", "2S"]]
        running.cancel()
        assert not stage.told(waiting)
        await stage.step()
        assert [type(answer) for answer in stage.told(waiting)] == [Cancelled]
        assert refused(stage, "1").message == NO_START.format(1)
        assert is_answered(stage, other)

    play(scene)


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_while_the_server_stops_a_sequence_that_has_begun_may_end_and_none_may_begin(strategy: str) -> None:
    async def scene() -> None:
        stage = Theatre(strategy)
        stage.ask("1S")
        await stage.shown()
        draining = asyncio.ensure_future(stage.model_queue.drain())
        await stage.settle()
        none = refused(stage, "2S")
        assert type(none) is Unavailable
        assert none.message == (
            "[request id: 1] Server is stopping, scheduler for model has stopped accepting new inference requests"
        )
        assert refused(stage, "2").message == NO_START.format(2)
        stage.ask("1", "1E")
        assert not draining.done()
        assert [await stage.step() for _ in range(3)] == [[["1S"]], [["1"]], [["1E"]]]
        await draining
        assert all(is_answered(stage, ticket) for ticket in stage.tickets)

    play(scene)
