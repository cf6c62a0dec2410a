"""Copies for a shadow: after the answer, bounded, and without any effect on callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import BackendError, BytesTensor, Cancelled, ConfigError, InferResponse
from headrace_router.shadow import Shadow, _fixed

from .board import ROW, Board, play
from .conftest import identity, router

DECOUPLED = "model_transaction_policy { decoupled: true }"


def shadow_of(board: Board) -> Shadow:
    assert board.router.shadow is not None
    return board.router.shadow


async def until(claim: Callable[[], bool]) -> None:
    while not claim():
        await asyncio.sleep(0)


def test_a_copy_is_sent_after_the_answer_and_compared() -> None:
    async def scene() -> None:
        board = Board(router("a = 1", shadow="b:2 = 1"))
        caller = board.send(id="7", parameters={"p": 1}, timeout_us=5, priority=3)
        assert [call.request.model_name for call in board.calls] == ["a"]
        board.answer()
        assert caller.target == "a by weights"
        assert board.calls == [], "the answer comes first"
        await until(lambda: bool(board.calls))
        copied = board.calls[0].request
        assert (copied.model_name, copied.model_version, copied.id) == ("b", "2", "7")
        assert (copied.parameters, copied.timeout_us, copied.priority) == ({"p": 1}, 0, 0)
        board.answer(InferResponse({"y": ROW + np.array([[0, 0.5]], np.float32)}))
        await until(lambda: shadow_of(board).outcomes["different"] == 1)
        assert len(caller.answers) == caller.ends == 1
        (found,) = board.router.shadow.status()["outputs"].items()  # type: ignore[union-attr]
        assert found == (
            "y",
            {
                "elements": 2,
                "beyond_tolerance": 1,
                "mean_relative_difference": pytest.approx(0.5 / 2.5 / 2),
                "largest_difference": 0.5,
            },
        )
        measured = board.router.measure()
        assert measured["headrace_router_shadow_beyond_tolerance_total"] == {"y": 1}
        assert measured["headrace_router_requests_total"] == {"a": 1}
        assert shadow_of(board).status()["in_flight"] == 0

    play(scene)


def test_a_shadow_that_fails_or_refuses_disturbs_nobody() -> None:
    async def scene() -> None:
        board = Board(router("a = 1", shadow="b = 1", max_error_rate=0, min_requests=1))
        first = board.serve()
        await until(lambda: bool(board.calls))
        board.answer(BackendError("broken"))
        second = board.send()
        board.refusal = BackendError("not loaded")
        board.answer()
        await until(lambda: shadow_of(board).outcomes["failed"] == 2)
        assert first.target == second.target == "a by weights"
        assert board.router.decider.rolled_back == {}

    play(scene)


def test_a_request_without_a_response_is_not_copied() -> None:
    async def scene() -> None:
        board = Board(router("a = 1", shadow="b = 1"))
        board.serve(BackendError("broken"))
        gone = board.send()
        gone.ticket.cancel()
        board.calls.clear()
        board.serve(sequence_id=3, sequence_start=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert board.calls == []
        assert shadow_of(board).status()["in_flight"] == 0

    play(scene)


def test_the_fraction_is_exact_and_may_change() -> None:
    async def scene() -> None:
        board = Board(router("a = 1", shadow="b = 0.25"))

        async def copies(count: int) -> int:
            for _ in range(count):
                board.serve()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if board.calls:
                    board.answer()
            await until(lambda: not shadow_of(board).status()["in_flight"])
            return shadow_of(board).outcomes["same"]

        assert abs(await copies(400) - 100) < 4
        board.router.apply({"weights": [1], "shadow": 0.0, "rolled_back": {}})
        before = shadow_of(board).outcomes["same"]
        assert await copies(50) == before

    play(scene)


def test_copies_in_flight_are_bounded_and_the_rest_is_counted() -> None:
    async def scene() -> None:
        board = Board(router("a = 1", shadow="b = 1"))
        shadow_of(board).limit = 3
        callers = [board.serve() for _ in range(5)]
        assert all(caller.target == "a by weights" for caller in callers)
        await until(lambda: len(board.calls) == 3)
        assert shadow_of(board).outcomes["dropped"] == 2
        board.answer()
        await until(lambda: shadow_of(board).outcomes["same"] == 1)
        board.send()
        assert shadow_of(board).outcomes["dropped"] == 2

    play(scene)


def test_the_inputs_of_copies_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.shadow._MOST_BYTES", 3 * ROW.nbytes)

    async def scene() -> None:
        board = Board(router("a = 1", shadow="b = 1"))
        for _ in range(5):
            board.serve()
        await until(lambda: len(board.calls) == 3)
        assert shadow_of(board).outcomes["dropped"] == 2
        board.answer()
        await until(lambda: shadow_of(board).outcomes["same"] == 1)
        board.send()
        assert shadow_of(board).outcomes["dropped"] == 2

    play(scene)


def test_a_shadow_that_is_a_target_is_not_compared_with_itself() -> None:
    async def scene() -> None:
        board = Board(router("a = 0, b = 1", shadow="b = 1"))
        board.serve()
        for _ in range(5):
            await asyncio.sleep(0)
        assert board.calls == []

    play(scene)


def test_closing_cancels_what_is_on_its_way() -> None:
    async def scene() -> None:
        board = Board(router("a = 1", shadow="b = 1"))
        board.serve()
        await until(lambda: bool(board.calls))
        waits = board.send()
        board.model_queue.close()
        assert board.cancelled[-1].request.model_name == "b"
        board.answer(Cancelled("gone"))
        assert shadow_of(board).outcomes["failed"] == 1
        assert waits.ends == 0

    play(scene)


@pytest.mark.parametrize(
    ("tensor", "is_kept"),
    [
        (np.frombuffer(bytes(8), np.float32)[1:], True),
        (np.frombuffer(memoryview(bytes(8))[4:], np.float32).reshape(1, 1), True),
        (np.frombuffer(bytearray(8), np.float32), False),
        (np.ones(2, np.float32), False),
        (BytesTensor(bytes(4), (1,)), True),
        (BytesTensor(bytearray(4), (1,)), False),
    ],
)
def test_inputs_in_memory_that_may_change_are_copied(tensor: Any, is_kept: bool) -> None:
    fixed = _fixed(tensor)
    assert (fixed is tensor) == is_kept
    assert fixed.shape == tensor.shape
    assert fixed.nbytes == tensor.nbytes


def test_a_caller_may_reuse_its_memory_after_the_answer() -> None:
    async def scene() -> None:
        board = Board(router("a = 1", shadow="b = 1"))
        mine = ROW.copy()
        board.send(mine)
        board.answer(InferResponse({"y": ROW}))
        mine[:] = -1
        await until(lambda: bool(board.calls))
        np.testing.assert_array_equal(board.calls[0].request.inputs["x"], ROW)

    play(scene)


def test_outputs_that_are_views_of_such_memory_are_copied_too() -> None:
    async def scene() -> None:
        board = Board(router("a = 1", shadow="b = 1"))
        mine = ROW.copy()
        board.send(mine)
        board.answer(InferResponse({"y": mine[:, ::-1]}))
        mine[:] = -1
        await until(lambda: bool(board.calls))
        board.answer(InferResponse({"y": ROW[:, ::-1]}))
        await until(lambda: shadow_of(board).outcomes["same"] == 1)
        strings = bytearray(b"\1\0\0\0a")
        board.send(BytesTensor(strings, (1, 1)))
        board.answer(InferResponse({"y": BytesTensor(strings, (1, 1))}))
        strings[4] = ord("b")
        await until(lambda: bool(board.calls))
        board.answer(InferResponse({"y": BytesTensor(b"\1\0\0\0a", (1, 1))}))
        await until(lambda: shadow_of(board).outcomes["same"] == 2)

    play(scene)


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
def test_a_shadow_that_does_not_fit(text: str, of: dict[str, str], why: str) -> None:
    async def scene() -> None:
        with pytest.raises(ConfigError, match=r"router 'r': ") as caught:
            Board(text, of)
        assert why in caught.value.message

    play(scene)
