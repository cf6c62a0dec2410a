"""The counts of one connection, and the time budget of all. That the server obeys them is tested in `test_abuse`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace_grpc.http2.frames import ENHANCE_YOUR_CALM, ConnectionFault
from headrace_grpc.http2.limits import BUDGET_NS, Allowance, Limits, Turns

LIMITS = Limits(idle_frames=10, frames_per_answer=3, faults=2)


class Answers:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        return self.count


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ConnectionFault as fault:
        return fault.code == ENHANCE_YOUR_CALM
    return False


def test_idle_frames_are_bounded_until_the_next_sweep() -> None:
    allowance = Allowance(LIMITS, Answers())
    allowance.count_idle(10)
    assert refused(allowance.count_idle)
    allowance.renew()
    allowance.count_idle(10)
    assert refused(lambda: allowance.count_idle(1))


def test_each_answer_allows_further_frames_once() -> None:
    answers = Answers()
    allowance = Allowance(LIMITS, answers)
    answers.count = 2
    allowance.count_idle(10 + 2 * 3)
    assert refused(allowance.count_idle)
    answers.count = 3
    allowance.renew()
    allowance.count_idle(10)
    assert refused(allowance.count_idle)  # the third answer was before the sweep


def test_a_reset_of_the_peer_allows_further_frames() -> None:
    allowance = Allowance(LIMITS, Answers())
    allowance.count_reset()
    allowance.count_idle(13)
    assert refused(allowance.count_idle)


def test_faults_are_bounded_until_the_next_sweep() -> None:
    allowance = Allowance(LIMITS, Answers())
    allowance.count_fault()
    allowance.count_fault()
    assert refused(allowance.count_fault)
    allowance.renew()
    allowance.count_fault()
    allowance.count_fault()
    assert refused(allowance.count_fault)


def run(scenario: Callable[[Turns], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(Turns()), 20)

    asyncio.run(main())


def test_a_spent_budget_is_filled_in_the_next_turn_of_the_loop() -> None:
    async def scenario(turns: Turns) -> None:
        await asyncio.sleep(0)
        turns.left_ns = -1
        assert not turns.is_over()  # the loop has turned since the start
        assert turns.left_ns == BUDGET_NS
        turns.left_ns = -1
        assert turns.is_over()
        await asyncio.sleep(0)
        assert not turns.is_over()

    run(scenario)


def test_time_is_subtracted_from_the_budget() -> None:
    async def scenario(turns: Turns) -> None:
        turns.begin()
        for _ in range(1000):
            pass
        turns.spend()
        spent = BUDGET_NS - turns.left_ns
        assert spent > 0
        turns.spend()
        assert BUDGET_NS - turns.left_ns < 2 * spent  # counts from the last call on

    run(scenario)


def test_connections_without_a_turn_run_first_and_the_others_wait_for_later_turns() -> None:
    async def scenario(turns: Turns) -> None:
        order: list[str] = []

        def work(name: str, cost_ns: int) -> Callable[[], None]:
            def go_on() -> None:
                order.append(name)
                turns.left_ns -= cost_ns

            return go_on

        turns.wait_again(work("again", 0))
        turns.wait(work("first", BUDGET_NS))
        turns.wait(work("second", 1))
        turns.wait(work("third", 0))
        assert turns.is_crowded
        await asyncio.sleep(0)
        assert order == ["first", "second"]  # the budget is spent
        await asyncio.sleep(0)
        assert order == ["first", "second", "third", "again"]
        assert not turns.is_crowded

    run(scenario)


def test_continued_work_leaves_half_of_the_budget_to_new_bytes() -> None:
    async def scenario(turns: Turns) -> None:
        order: list[int] = []

        def go_on(number: int) -> None:
            order.append(number)
            turns.left_ns -= BUDGET_NS // 2 + 1

        for number in range(2):
            turns.wait_again(lambda number=number: go_on(number))  # type: ignore[misc]
        await asyncio.sleep(0)
        assert order == [0]
        assert turns.left_ns > 0
        await asyncio.sleep(0)
        assert order == [0, 1]

    run(scenario)


def test_a_task_waits_for_its_turn_and_may_be_cancelled() -> None:
    async def scenario(turns: Turns) -> None:
        cancelled = asyncio.ensure_future(turns.task_turn())
        waiting = asyncio.ensure_future(turns.task_turn())
        await asyncio.sleep(0)
        assert not waiting.done()
        cancelled.cancel()
        await waiting
        assert turns.left_ns < BUDGET_NS
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    run(scenario)
