"""A router and one request: it forwards the request and the answers, and cancels the call of a cancelled request."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from headrace import BackendError, Cancelled, InferResponse, InvalidArgument
from headrace_testing.simulator import run_scenario

from .conftest import identity, router
from .simulator import ROW, RouterSimulator

DECOUPLED = "model_transaction_policy { decoupled: true }"
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 1000000 }"


def test_the_request_reaches_the_target_unchanged() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a:3 = 1"))
        caller = simulator.send(id="7", parameters={"beta": True}, priority=2, timeout_us=9, callers=("e",))
        forwarded = simulator.calls[0].request
        assert forwarded.inputs is caller.ticket.request.inputs, "nothing is copied"
        assert (forwarded.model_name, forwarded.model_version, forwarded.id) == ("a", "3", "7")
        assert (forwarded.parameters, forwarded.priority, forwarded.timeout_us) == ({"beta": True}, 2, 9)
        assert (forwarded.caller, forwarded.callers) == (caller.ticket.request, ("e", "r"))
        outputs = {"y": ROW}
        simulator.answer(InferResponse(outputs, {"own": 1}, "a", "3", "7"))
        (answer,) = caller.answers
        assert isinstance(answer, InferResponse)
        assert answer.outputs is outputs
        assert (answer.model_name, answer.model_version, answer.id) == ("r", "1", "7")
        assert answer.parameters == {"own": 1, "headrace_target": "a:3", "headrace_routed_by": "weights"}

    run_scenario(scenario)


def test_an_error_reaches_the_caller_unchanged() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1"))
        error = BackendError("broken")
        assert simulator.serve(error).answers == [error]
        simulator.refusal = InvalidArgument("not so")
        caller = simulator.send()
        assert caller.answers == [simulator.refusal]
        assert caller.ends == 1
        assert simulator.router.measure()["headrace_router_errors_total"] == {"a": 2}
        assert simulator.statistics.other_failures.count == 2

    run_scenario(scenario)


def test_cancelling_a_request_cancels_its_call_of_the_target() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1"))
        cancelled, stays = simulator.send(), simulator.send()
        cancelled.ticket.cancel()
        assert [call.request.caller for call in simulator.cancelled] == [cancelled.ticket.request]
        assert [type(answer) for answer in cancelled.answers] == [Cancelled]
        simulator.answer(Cancelled("gone"))  # the late end of what was cancelled
        simulator.answer()
        assert (cancelled.ends, stays.ends, stays.target) == (1, 1, "a by weights")
        assert simulator.model_queue.in_flight == 0

    run_scenario(scenario)


def test_every_response_of_a_decoupled_target_is_forwarded() -> None:
    async def scenario() -> None:
        decoupled = identity(more=DECOUPLED)
        simulator = RouterSimulator(router("a = 1, b = 0"), {"a": decoupled, "b": decoupled})
        assert simulator.config.model_transaction_policy.decoupled
        caller = simulator.send()
        assert simulator.calls[0].request.decoupled
        for number in range(3):
            simulator.answer(InferResponse({"y": np.array([[number]], np.float32)}), final=False)
            assert len(caller.answers) == number + 1
            assert caller.target == "a by weights"
        caller.ticket.read()
        assert simulator.reads == 1, "a slow reader stops the target"
        simulator.answer_last()
        assert (caller.ends, len(caller.answers)) == (1, 3)
        assert simulator.router.measure()["headrace_router_requests_total"] == {"a": 1, "b": 0}

    run_scenario(scenario)


def test_repeated_changes_of_weights_are_applied() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1, b = 1"))
        found = []
        for _ in range(40):
            simulator.router.apply({"weights": [1, 1], "shadow": None, "rolled_back": {}})
            found.append(simulator.serve().target)
        assert abs(found.count("a by weights") - 20) < 4

    run_scenario(scenario)


def test_requests_leave_nothing_for_the_garbage_collector() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1, b = 1", sticky="parameter:user", shadow="a = 1"))
        assert simulator.router.shadow is not None

        async def ask(number: int) -> None:
            caller = simulator.send(parameters={"user": number})
            if number % 7 == 0:
                caller.ticket.cancel()
                simulator.calls.clear()
                simulator.cancelled.clear()
            else:
                simulator.answer(BackendError("broken") if number % 5 == 0 else None)
            del caller.ticket  # a reference cycle of the test itself
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            while simulator.calls:
                simulator.answer()

        for number in range(100):
            if number == 50:
                gc.collect()
            await ask(number)
        while simulator.router.shadow.status()["in_flight"]:
            await asyncio.sleep(0)
        assert sum(simulator.router.shadow.outcomes.values()) > 10
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            found = [type(each).__name__ for each in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert {"Ticket", "InferRequest", "InferResponse", "Copy"}.isdisjoint(found), found

    run_scenario(scenario)


def test_a_sequence_stays_with_the_target_that_got_its_start() -> None:
    async def scenario() -> None:
        stateful = identity(more=SEQUENCES)
        simulator = RouterSimulator(router("a = 1, b = 1"), {"a": stateful, "b": stateful})
        begun = {name: simulator.serve(sequence_id=name, sequence_start=True).target for name in range(1, 21)}
        assert set(begun.values()) == {"a by weights", "b by weights"}
        simulator.router.apply({"weights": [1, 0], "shadow": None, "rolled_back": {}})
        for name, target in begun.items():
            ticket = simulator.send(sequence_id=name).ticket
            assert simulator.model_queue.full_scheduler.continues(ticket)
            simulator.answer()
            assert simulator.serve(sequence_id=name).target == target.replace("weights", "sequence")
            assert simulator.serve(sequence_id=name, sequence_end=True).target == target.replace("weights", "sequence")
        assert simulator.serve(sequence_id=2).target == "a by sequence", "one that has ended is refused by the baseline"
        assert not simulator.model_queue.full_scheduler.continues(ticket)

    run_scenario(scenario)


def test_sequences_without_an_end_expire() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1"), {"a": identity(more=SEQUENCES)})
        for name in range(1, 1001):
            simulator.serve(sequence_id=name, sequence_start=True)
        simulator.clock.advance(4_000_000_000)
        ticket = simulator.send(sequence_id=1).ticket
        assert simulator.model_queue.full_scheduler.continues(ticket), "only a further sequence makes others forgotten"
        simulator.answer()
        simulator.serve(sequence_id="x", sequence_start=True)
        assert not simulator.model_queue.full_scheduler.continues(simulator.send(sequence_id=2).ticket)

    run_scenario(scenario)


def test_sequences_of_targets_without_state_follow_the_sticky_key() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1, b = 1", sticky="sequence"))
        found = {
            name: {simulator.serve(sequence_id=name).target for _ in range(3)} for name in ("x", "y", "z", 1, 2, 3)
        }
        assert all(len(each) == 1 for each in found.values())
        assert {each for targets in found.values() for each in targets} == {"a by sticky", "b by sticky"}

    run_scenario(scenario)


@pytest.mark.parametrize("parameters", [{}, {"beta": "x"}])
def test_a_request_may_name_only_outputs_of_the_router(parameters: dict[str, str]) -> None:
    async def scenario() -> None:
        more = identity() + 'output { name: "extra" data_type: TYPE_FP32 dims: [1] }'
        simulator = RouterSimulator(router("a = 1, b = 0", rules="parameter:beta -> b"), {"b": more})
        simulator.send(parameters=parameters)
        assert simulator.calls[0].request.outputs == (("y",) if parameters else ())

    run_scenario(scenario)
