"""The bytes that all connections hold together, and the bodies that wait for memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace_hosts.held_bytes import HeldBytes


class Connection:
    """A holder, which notes that it was ended."""

    def __init__(self, is_slow: bool = False, waits_for_peer: bool = True) -> None:
        self.is_slow, self.waits_for_peer = is_slow, waits_for_peer
        self.is_over = False

    def shed(self) -> None:
        self.is_over = True


def held(limit_bytes: int, *sizes: tuple[Connection, int]) -> list[bool]:
    """Return the connections that have ended, once they hold this much."""
    return asyncio.run(_held(limit_bytes, *sizes))


async def _held(limit_bytes: int, *sizes: tuple[Connection, int]) -> list[bool]:
    ledger = HeldBytes(limit_bytes)
    for connection, size in sizes:
        ledger.set(connection, size)
    assert ledger.total_bytes == sum(size for _, size in sizes)
    await asyncio.sleep(0)
    assert ledger.total_bytes == sum(size for connection, size in sizes if not connection.is_over)
    return [connection.is_over for connection, _ in sizes]


def test_up_to_a_sixteenth_more_than_the_limit_only_slow_ones_end() -> None:
    assert held(100, (Connection(), 60), (Connection(), 40)) == [False, False]
    assert held(100, (Connection(), 60), (Connection(), 46)) == [False, False]
    assert held(100, (Connection(), 60), (Connection(is_slow=True), 41)) == [False, True]


def test_the_one_that_holds_most_ends_and_the_others_do_not() -> None:
    assert held(100, (Connection(), 20), (Connection(), 60), (Connection(), 33)) == [False, True, False]


def test_slow_callers_end_before_one_that_holds_more() -> None:
    small = [Connection(is_slow=True) for _ in range(3)]
    sizes = [(each, 10) for each in small]
    large, *ended = held(100, (Connection(), 75), *sizes)
    assert (large, sum(ended)) == (False, 2)


def test_request_that_waits_for_the_server_does_not_time_out() -> None:
    working = Connection(waits_for_peer=False)
    assert held(100, (working, 90), (Connection(), 23)) == [False, True]


def test_released_bytes_are_not_counted() -> None:
    asyncio.run(_let_go())


async def _let_go() -> None:
    ledger, one, other = HeldBytes(100), Connection(), Connection()
    for _ in range(10):
        ledger.set(one, 90)
        ledger.set(one, 0)
        ledger.set(other, 30)
    await asyncio.sleep(0)
    assert (ledger.total_bytes, one.is_over, other.is_over) == (30, False, False)


class Body:
    """A connection whose body arrives as soon as it may."""

    is_slow = False
    peer = "192.0.2.7"

    def __init__(self, ledger: HeldBytes, size_bytes: int, arrived_bytes: int = 0) -> None:
        self.ledger, self.size_bytes = ledger, size_bytes
        self.kept_bytes = arrived_bytes
        self.is_waiting = False
        self.reason = ""
        ledger.set(self, arrived_bytes)

    @property
    def waits_for_peer(self) -> bool:
        return not self.is_waiting

    @property
    def is_whole(self) -> bool:
        return self.kept_bytes == self.size_bytes and not self.reason

    def ask(self, is_slow: bool = False) -> None:
        self.is_waiting = True
        self.ledger.ask(self, self.size_bytes - self.kept_bytes, is_slow)

    def proceed(self) -> None:
        self.is_waiting = False
        self.kept_bytes = self.size_bytes
        self.ledger.set(self, self.size_bytes)

    def refuse(self, reason: str) -> None:
        self.is_waiting, self.reason, self.kept_bytes = False, reason, 0
        self.ledger.set(self, 0)

    def shed(self) -> None:
        self.refuse("shed")

    def end(self) -> None:
        self.ledger.set(self, 0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_above_three_quarters_a_body_proceeds_while_its_rest_fits() -> None:
    async def scenario() -> None:
        ledger = HeldBytes(100)
        tight = []
        Body(ledger, 75, 75)
        tight.append(ledger.is_tight)
        first = Body(ledger, 20, 5)
        tight.append(ledger.is_tight)
        assert tight == [False, True]
        first.ask()
        assert (first.is_whole, ledger.total_bytes, ledger.waiting) == (True, 95, 0)

    run(scenario)


def test_a_body_waits_until_its_rest_fits_in_order_of_arrival() -> None:
    async def scenario() -> None:
        ledger = HeldBytes(100)
        working = Body(ledger, 60, 60)
        first, second = Body(ledger, 30, 10), Body(ledger, 12, 10)
        first.ask()
        assert first.is_whole
        second.end()
        large, small = Body(ledger, 40), Body(ledger, 1)
        large.ask()
        small.ask()  # it would fit, but it arrived later
        await asyncio.sleep(0)
        assert (large.is_whole, small.is_whole, ledger.waiting) == (False, False, 2)
        working.end()
        await asyncio.sleep(0)
        assert (large.is_whole, small.is_whole, ledger.waiting) == (True, True, 0)
        assert ledger.refused == 0

    run(scenario)


def test_bodies_that_are_all_half_way_are_no_deadlock() -> None:
    """Nothing else will ever be free: the last ones are refused, the others arrive one after the other."""

    async def scenario() -> None:
        ledger = HeldBytes(100)
        bodies = [Body(ledger, 30, 19) for _ in range(5)]
        for body in bodies:
            body.ask()
        answered = []
        for _ in range(20):
            await asyncio.sleep(0)
            for body in bodies:
                if body.is_whole and body not in answered:
                    answered.append(body)
                    body.end()
        refused = [body for body in bodies if body.reason]
        assert len(answered) + len(refused) == 5
        assert len(answered) >= 3
        assert answered == bodies[: len(answered)]
        assert (ledger.total_bytes, ledger.waiting) == (0, 0)

    run(scenario)


def test_a_body_that_waits_too_long_is_refused_with_the_figures() -> None:
    async def scenario() -> None:
        ledger = HeldBytes(100, wait_s=0.01)
        Body(ledger, 90, 90)
        body = Body(ledger, 20, 8)
        body.ask()
        while ledger.waiting:
            await asyncio.sleep(0.05)
        assert "has waited for 0.01 s" in body.reason
        assert "98 of the 100 bytes" in body.reason
        assert (ledger.total_bytes, ledger.refused) == (90, 1)

    run(scenario)


def test_a_slow_caller_does_not_wait() -> None:
    async def scenario() -> None:
        ledger = HeldBytes(100)
        Body(ledger, 90, 90)
        body = Body(ledger, 20, 8)
        body.ask(is_slow=True)
        assert body.reason
        assert ledger.waiting == 0

    run(scenario)


def test_slow_holders_end_for_a_body_that_waits() -> None:
    async def scenario() -> None:
        ledger = HeldBytes(100)
        slow = Connection(is_slow=True)
        ledger.set(slow, 40)
        ledger.set(Connection(), 50)
        body = Body(ledger, 20, 5)
        body.ask()
        while not body.is_whole:
            assert not body.reason
            await asyncio.sleep(0.05)
        assert slow.is_over

    run(scenario)


def test_a_body_that_ends_waits_no_more() -> None:
    async def scenario() -> None:
        ledger = HeldBytes(100)
        working = Body(ledger, 90, 90)
        body, other = Body(ledger, 50), Body(ledger, 15)
        body.ask()
        other.ask()
        ledger.leave(body)
        working.end()
        await asyncio.sleep(0)
        assert (body.is_whole, other.is_whole) == (False, True)

    run(scenario)


def test_a_port_with_a_limit_counts_in_the_budget_too() -> None:
    async def scenario() -> None:
        budget = HeldBytes(1000)
        port, connection, other = HeldBytes(100, budget), Connection(), Connection()
        port.set(connection, 80)
        budget.set(other, 500)
        assert (port.total_bytes, budget.total_bytes) == (80, 580)
        port.set(connection, 113)
        await asyncio.sleep(0)
        assert (connection.is_over, other.is_over) == (True, False)
        assert (port.total_bytes, budget.total_bytes) == (0, 500)

    run(scenario)


@pytest.mark.parametrize("step", [1, 7, 100])
def test_any_order_of_many_bodies_ends(step: int) -> None:
    """Each is answered or refused, nothing remains, and the count is never above the limit."""

    async def scenario() -> None:
        ledger = HeldBytes(1000, wait_s=5)
        bodies = [Body(ledger, 100 + 37 * number % 400, number * step % 18) for number in range(40)]
        for body in bodies:
            if not body.reason:
                body.ask()
        while any(not body.is_whole and not body.reason for body in bodies):
            assert ledger.in_use_bytes <= 1000
            await asyncio.sleep(0)
            for body in bodies:
                if body.is_whole:
                    body.end()
        for body in bodies:
            body.end()
        assert (ledger.total_bytes, ledger.waiting) == (0, 0)

    run(scenario)


def test_many_refusals_leave_turns_to_others() -> None:
    """A thousand refused in one turn would delay everybody by 0.1 s."""

    async def scenario() -> None:
        ledger = HeldBytes(1000, wait_s=0)
        working = Body(ledger, 999, 999)
        bodies = [Body(ledger, 500) for _ in range(100)]
        for body in bodies:
            body.ask()
        most, before = 0, 0
        while ledger.waiting:
            await asyncio.sleep(0)
            most, before = max(most, ledger.refused - before), ledger.refused
        working.end()
        assert ledger.refused == 100
        assert most <= 64

    run(scenario)
