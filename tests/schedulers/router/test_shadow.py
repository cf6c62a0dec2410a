"""Copies for a shadow: after the answer, bounded, and without any effect on callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import BackendError, BytesTensor, Cancelled, ConfigError, InferResponse
from headrace_router.shadow import Shadow, _fixed
from headrace_testing.simulator import run_scenario

from .conftest import identity, router
from .simulator import ROW, RouterSimulator

DECOUPLED = "model_transaction_policy { decoupled: true }"


def shadow_of(simulator: RouterSimulator) -> Shadow:
    assert simulator.router.shadow is not None
    return simulator.router.shadow


async def until(claim: Callable[[], bool]) -> None:
    while not claim():
        await asyncio.sleep(0)


def test_a_copy_is_sent_after_the_answer_and_compared() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1", shadow="b:2 = 1"))
        caller = simulator.send(id="7", parameters={"p": 1}, timeout_us=5, priority=3)
        assert [call.request.model_name for call in simulator.calls] == ["a"]
        simulator.answer()
        assert caller.target == "a by weights"
        assert simulator.calls == [], "the answer comes first"
        await until(lambda: bool(simulator.calls))
        copied = simulator.calls[0].request
        assert (copied.model_name, copied.model_version, copied.id) == ("b", "2", "7")
        assert (copied.parameters, copied.timeout_us, copied.priority) == ({"p": 1}, 0, 0)
        simulator.answer(InferResponse({"y": ROW + np.array([[0, 0.5]], np.float32)}))
        await until(lambda: shadow_of(simulator).outcomes["different"] == 1)
        assert len(caller.answers) == caller.ends == 1
        (found,) = simulator.router.shadow.status()["outputs"].items()  # type: ignore[union-attr]
        assert found == (
            "y",
            {
                "elements": 2,
                "beyond_tolerance": 1,
                "mean_relative_difference": pytest.approx(0.5 / 2.5 / 2),
                "largest_difference": 0.5,
            },
        )
        measured = simulator.router.measure()
        assert measured["headrace_router_shadow_beyond_tolerance_total"] == {"y": 1}
        assert measured["headrace_router_requests_total"] == {"a": 1}
        assert shadow_of(simulator).status()["in_flight"] == 0

    run_scenario(scenario)


def test_a_failing_shadow_affects_no_caller() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1", shadow="b = 1", max_error_rate=0, min_requests=1))
        first = simulator.serve()
        await until(lambda: bool(simulator.calls))
        simulator.answer(BackendError("broken"))
        second = simulator.send()
        simulator.refusal = BackendError("not loaded")
        simulator.answer()
        await until(lambda: shadow_of(simulator).outcomes["failed"] == 2)
        assert first.target == second.target == "a by weights"
        assert simulator.router.decider.rolled_back == {}

    run_scenario(scenario)


def test_a_request_without_a_response_is_not_copied() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1", shadow="b = 1"))
        simulator.serve(BackendError("broken"))
        cancelled = simulator.send()
        cancelled.ticket.cancel()
        simulator.calls.clear()
        simulator.serve(sequence_id=3, sequence_start=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert simulator.calls == []
        assert shadow_of(simulator).status()["in_flight"] == 0

    run_scenario(scenario)


def test_the_fraction_is_exact_and_may_change() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1", shadow="b = 0.25"))

        async def copies(count: int) -> int:
            for _ in range(count):
                simulator.serve()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if simulator.calls:
                    simulator.answer()
            await until(lambda: not shadow_of(simulator).status()["in_flight"])
            return shadow_of(simulator).outcomes["same"]

        assert abs(await copies(400) - 100) < 4
        simulator.router.apply({"weights": [1], "shadow": 0.0, "rolled_back": {}})
        before = shadow_of(simulator).outcomes["same"]
        assert await copies(50) == before

    run_scenario(scenario)


def test_copies_in_flight_are_limited_and_dropped_ones_counted() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1", shadow="b = 1"))
        shadow_of(simulator).limit = 3
        callers = [simulator.serve() for _ in range(5)]
        assert all(caller.target == "a by weights" for caller in callers)
        await until(lambda: len(simulator.calls) == 3)
        assert shadow_of(simulator).outcomes["dropped"] == 2
        simulator.answer()
        await until(lambda: shadow_of(simulator).outcomes["same"] == 1)
        simulator.send()
        assert shadow_of(simulator).outcomes["dropped"] == 2

    run_scenario(scenario)


def test_the_inputs_of_copies_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.shadow._MAX_BYTES", 3 * ROW.nbytes)

    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1", shadow="b = 1"))
        for _ in range(5):
            simulator.serve()
        await until(lambda: len(simulator.calls) == 3)
        assert shadow_of(simulator).outcomes["dropped"] == 2
        simulator.answer()
        await until(lambda: shadow_of(simulator).outcomes["same"] == 1)
        simulator.send()
        assert shadow_of(simulator).outcomes["dropped"] == 2

    run_scenario(scenario)


def test_a_shadow_that_is_a_target_is_not_compared_with_itself() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 0, b = 1", shadow="b = 1"))
        simulator.serve()
        for _ in range(5):
            await asyncio.sleep(0)
        assert simulator.calls == []

    run_scenario(scenario)


def test_close_cancels_calls_in_flight() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1", shadow="b = 1"))
        simulator.serve()
        await until(lambda: bool(simulator.calls))
        waits = simulator.send()
        simulator.model_queue.close()
        assert simulator.cancelled[-1].request.model_name == "b"
        simulator.answer(Cancelled("gone"))
        assert shadow_of(simulator).outcomes["failed"] == 1
        assert waits.ends == 0

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("tensor", "is_uncopied"),
    [
        (np.frombuffer(bytes(8), np.float32)[1:], True),
        (np.frombuffer(memoryview(bytes(8))[4:], np.float32).reshape(1, 1), True),
        (np.frombuffer(bytearray(8), np.float32), False),
        (np.ones(2, np.float32), False),
        (BytesTensor(bytes(4), (1,)), True),
        (BytesTensor(bytearray(4), (1,)), False),
    ],
)
def test_inputs_in_mutable_memory_are_copied(tensor: Any, is_uncopied: bool) -> None:
    fixed = _fixed(tensor)
    assert (fixed is tensor) == is_uncopied
    assert fixed.shape == tensor.shape
    assert fixed.nbytes == tensor.nbytes


def test_a_caller_may_reuse_its_memory_after_the_answer() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1", shadow="b = 1"))
        mine = ROW.copy()
        simulator.send(mine)
        simulator.answer(InferResponse({"y": ROW}))
        mine[:] = -1
        await until(lambda: bool(simulator.calls))
        np.testing.assert_array_equal(simulator.calls[0].request.inputs["x"], ROW)

    run_scenario(scenario)


def test_outputs_that_view_mutable_memory_are_copied() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1", shadow="b = 1"))
        mine = ROW.copy()
        simulator.send(mine)
        simulator.answer(InferResponse({"y": mine[:, ::-1]}))
        mine[:] = -1
        await until(lambda: bool(simulator.calls))
        simulator.answer(InferResponse({"y": ROW[:, ::-1]}))
        await until(lambda: shadow_of(simulator).outcomes["same"] == 1)
        strings = bytearray(b"\1\0\0\0a")
        simulator.send(BytesTensor(strings, (1, 1)))
        simulator.answer(InferResponse({"y": BytesTensor(strings, (1, 1))}))
        strings[4] = ord("b")
        await until(lambda: bool(simulator.calls))
        simulator.answer(InferResponse({"y": BytesTensor(b"\1\0\0\0a", (1, 1))}))
        await until(lambda: shadow_of(simulator).outcomes["same"] == 2)

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("text", "of", "why"),
    [
        (
            router("a = 1", shadow="b = 1"),
            {"b": identity(datatype="INT32")},
            "target 'b' cannot stand for 'a': input 'x'",
        ),
        (
            router("a = 1", shadow="b = 1"),
            {"a": identity(more=DECOUPLED), "b": identity(more=DECOUPLED)},
            "'a' is decoupled, and responses of decoupled models are not compared: leave out the shadow",
        ),
    ],
)
def test_a_shadow_that_does_not_fit_is_refused(text: str, of: dict[str, str], why: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match=r"router 'r': ") as caught:
            RouterSimulator(text, of)
        assert why in caught.value.message

    run_scenario(scenario)
