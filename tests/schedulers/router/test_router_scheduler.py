"""What a router does with one request: passes it on, passes the answers back, and stops when its caller leaves."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from headrace import BackendError, Cancelled, InferResponse, InvalidArgument

from .board import ROW, Board, play
from .conftest import identity, router

DECOUPLED = "model_transaction_policy { decoupled: true }"
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 1000000 }"


def test_the_request_reaches_the_target_as_it_is() -> None:
    async def scene() -> None:
        board = Board(router("a:3 = 1"))
        caller = board.send(id="7", parameters={"beta": True}, priority=2, timeout_us=9, callers=("e",))
        asked = board.calls[0].request
        assert asked.inputs is caller.ticket.request.inputs, "nothing is copied"
        assert (asked.model_name, asked.model_version, asked.id) == ("a", "3", "7")
        assert (asked.parameters, asked.priority, asked.timeout_us) == ({"beta": True}, 2, 9)
        assert (asked.caller, asked.callers) == (caller.ticket.request, ("e", "r"))
        given = {"y": ROW}
        board.answer(InferResponse(given, {"own": 1}, "a", "3", "7"))
        (answer,) = caller.answers
        assert isinstance(answer, InferResponse)
        assert answer.outputs is given
        assert (answer.model_name, answer.model_version, answer.id) == ("r", "1", "7")
        assert answer.parameters == {"own": 1, "headrace_target": "a:3", "headrace_routed_by": "weights"}

    play(scene)


def test_an_error_reaches_the_caller_unchanged() -> None:
    async def scene() -> None:
        board = Board(router("a = 1"))
        error = BackendError("broken")
        assert board.serve(error).answers == [error]
        board.refusal = InvalidArgument("not so")
        caller = board.send()
        assert caller.answers == [board.refusal]
        assert caller.ends == 1
        assert board.router.measure()["headrace_router_errors_total"] == {"a": 2}
        assert board.statistics.other_failures.count == 2

    play(scene)


def test_a_caller_that_leaves_takes_its_request_along() -> None:
    async def scene() -> None:
        board = Board(router("a = 1"))
        gone, stays = board.send(), board.send()
        gone.ticket.cancel()
        assert [call.request.caller for call in board.cancelled] == [gone.ticket.request]
        assert [type(answer) for answer in gone.answers] == [Cancelled]
        board.answer(Cancelled("gone"))  # the late end of what was cancelled
        board.answer()
        assert (gone.ends, stays.ends, stays.target) == (1, 1, "a by weights")
        assert board.model_queue.in_flight == 0

    play(scene)


def test_every_response_of_a_decoupled_target_is_passed_on() -> None:
    async def scene() -> None:
        decoupled = identity(more=DECOUPLED)
        board = Board(router("a = 1, b = 0"), {"a": decoupled, "b": decoupled})
        assert board.config.model_transaction_policy.decoupled
        caller = board.send()
        assert board.calls[0].request.decoupled
        for number in range(3):
            board.answer(InferResponse({"y": np.array([[number]], np.float32)}), final=False)
            assert len(caller.answers) == number + 1
            assert caller.target == "a by weights"
        caller.ticket.read()
        assert board.reads == 1, "a slow reader stops the target"
        board.answer_last()
        assert (caller.ends, len(caller.answers)) == (1, 3)
        assert board.router.measure()["headrace_router_requests_total"] == {"a": 1, "b": 0}

    play(scene)


def test_weights_that_are_set_again_and_again_are_kept() -> None:
    async def scene() -> None:
        board = Board(router("a = 1, b = 1"))
        found = []
        for _ in range(40):
            board.router.apply({"weights": [1, 1], "shadow": None, "rolled_back": {}})
            found.append(board.serve().target)
        assert abs(found.count("a by weights") - 20) < 4

    play(scene)


def test_requests_leave_nothing_for_the_garbage_collector() -> None:
    async def scene() -> None:
        board = Board(router("a = 1, b = 1", sticky="parameter:user", shadow="a = 1"))
        assert board.router.shadow is not None

        async def ask(number: int) -> None:
            caller = board.send(parameters={"user": number})
            if number % 7 == 0:
                caller.ticket.cancel()
                board.calls.clear()
                board.cancelled.clear()
            else:
                board.answer(BackendError("broken") if number % 5 == 0 else None)
            del caller.ticket  # the test's own circle: the ticket has the caller, to tell it
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            while board.calls:
                board.answer()

        for number in range(100):
            if number == 50:
                gc.collect()
            await ask(number)
        while board.router.shadow.status()["in_flight"]:
            await asyncio.sleep(0)
        assert sum(board.router.shadow.outcomes.values()) > 10
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            found = [type(each).__name__ for each in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert {"Ticket", "InferRequest", "InferResponse", "Copy"}.isdisjoint(found), found

    play(scene)


def test_a_sequence_stays_with_the_target_that_got_its_start() -> None:
    async def scene() -> None:
        stateful = identity(more=SEQUENCES)
        board = Board(router("a = 1, b = 1"), {"a": stateful, "b": stateful})
        begun = {name: board.serve(sequence_id=name, sequence_start=True).target for name in range(1, 21)}
        assert set(begun.values()) == {"a by weights", "b by weights"}
        board.router.apply({"weights": [1, 0], "shadow": None, "rolled_back": {}})
        for name, target in begun.items():
            ticket = board.send(sequence_id=name).ticket
            assert board.model_queue.full_scheduler.continues(ticket)
            board.answer()
            assert board.serve(sequence_id=name).target == target.replace("weights", "sequence")
            assert board.serve(sequence_id=name, sequence_end=True).target == target.replace("weights", "sequence")
        assert board.serve(sequence_id=2).target == "a by sequence", "one that has ended is refused by the baseline"
        assert not board.model_queue.full_scheduler.continues(ticket)

    play(scene)


def test_sequences_that_never_end_are_forgotten() -> None:
    async def scene() -> None:
        board = Board(router("a = 1"), {"a": identity(more=SEQUENCES)})
        for name in range(1, 1001):
            board.serve(sequence_id=name, sequence_start=True)
        board.clock.turn(4_000_000_000)
        ticket = board.send(sequence_id=1).ticket
        assert board.model_queue.full_scheduler.continues(ticket), "only a further sequence makes others forgotten"
        board.answer()
        board.serve(sequence_id="x", sequence_start=True)
        assert not board.model_queue.full_scheduler.continues(board.send(sequence_id=2).ticket)

    play(scene)


def test_sequences_of_targets_without_state_follow_the_sticky_key() -> None:
    async def scene() -> None:
        board = Board(router("a = 1, b = 1", sticky="sequence"))
        found = {name: {board.serve(sequence_id=name).target for _ in range(3)} for name in ("x", "y", "z", 1, 2, 3)}
        assert all(len(each) == 1 for each in found.values())
        assert {each for targets in found.values() for each in targets} == {"a by sticky", "b by sticky"}

    play(scene)


@pytest.mark.parametrize("parameters", [{}, {"beta": "x"}])
def test_a_request_names_the_outputs_that_the_router_has(parameters: dict[str, str]) -> None:
    async def scene() -> None:
        more = identity() + 'output { name: "extra" data_type: TYPE_FP32 dims: [1] }'
        board = Board(router("a = 1, b = 0", rules="parameter:beta -> b"), {"b": more})
        board.send(parameters=parameters)
        assert board.calls[0].request.outputs == (("y",) if parameters else ())

    play(scene)
