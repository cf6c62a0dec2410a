"""The memory that the budget counts for a request to the ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.errors import OutOfMemory
from headrace_hosts.held_bytes import HeldBytes
from headrace_http.asgi_memory import RequestMemory

MIB = 1 << 20


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_small_body_counts_nothing_and_a_large_one_until_the_end() -> None:
    async def scenario() -> None:
        budget = HeldBytes(10 * MIB)
        small, large = RequestMemory(budget), RequestMemory(budget)
        await small.arrived(1000, 0)
        await large.arrived(MIB, 2 * MIB)
        assert budget.total_bytes == MIB
        await large.arrived(3 * MIB, 0)
        assert budget.total_bytes == 3 * MIB
        large.responds(5 * MIB)
        assert budget.total_bytes == 5 * MIB
        large.end()
        small.end()
        assert budget.total_bytes == 0

    run(scenario)


@pytest.mark.parametrize("missing_bytes", [2 * MIB, None])
def test_a_large_body_waits_until_there_is_memory(missing_bytes: int | None) -> None:
    async def scenario() -> None:
        budget = HeldBytes(10 * MIB)
        other, body = RequestMemory(budget), RequestMemory(budget)
        await other.arrived(8 * MIB, 0)
        waiting = asyncio.ensure_future(body.arrived(2 * MIB - 1, missing_bytes))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        other.end()
        await waiting
        assert budget.total_bytes == 2 * MIB - 1 + (missing_bytes or 2 * MIB - 1)  # bytes that have yet to arrive count
        body.end()
        assert (budget.total_bytes, budget.waiting) == (0, 0)

    run(scenario)


def test_a_body_that_waits_too_long_is_refused() -> None:
    async def scenario() -> None:
        budget = HeldBytes(10 * MIB, wait_s=0)
        other, body = RequestMemory(budget), RequestMemory(budget)
        await other.arrived(9 * MIB, 0)
        with pytest.raises(OutOfMemory, match="has waited for 0 s"):
            await body.arrived(MIB, 5 * MIB)
        body.end()
        assert budget.total_bytes == 9 * MIB

    run(scenario)


def test_a_caller_who_leaves_while_it_waits_is_forgotten() -> None:
    async def scenario() -> None:
        budget = HeldBytes(10 * MIB)
        other, body = RequestMemory(budget), RequestMemory(budget)
        await other.arrived(9 * MIB, 0)
        waiting = asyncio.ensure_future(body.arrived(MIB, 5 * MIB))
        await asyncio.sleep(0)
        assert budget.waiting == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        body.end()
        assert (budget.waiting, budget.total_bytes) == (0, 9 * MIB)

    run(scenario)
