"""The number of loads that run at once, and the slot of a load that waits for another one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any

import pytest

from headrace.models.running_loads import LoadSlots


def run(scenario: Callable[[LoadSlots], Coroutine[Any, Any, None]], count: int) -> None:
    async def limited() -> None:
        with closing(LoadSlots(count)) as slots:
            await asyncio.wait_for(scenario(slots), 30)

    asyncio.run(limited())


class Work:
    """Runs until it is released; records the most that ran at once."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.gate = threading.Event()
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.gate.wait(20)
        with self._lock:
            self.running -= 1


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("count", [1, 3])
def test_as_much_runs_at_once_as_there_are_places(count: int) -> None:
    work = Work()

    async def scenario(slots: LoadSlots) -> None:
        all_of_it = asyncio.gather(*(slots.run(work) for _ in range(10)))
        await until(lambda: work.running == count)
        work.gate.set()
        await all_of_it
        assert work.most == count

    run(scenario, count)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_work_that_waits_for_other_work_in_a_long_row_ends(count: int) -> None:
    async def scenario(slots: LoadSlots) -> None:
        loop = asyncio.get_running_loop()
        depths = []

        async def wait_for(depth: int) -> None:
            with slots.lent():
                await slots.run(work, depth)

        def work(depth: int) -> None:
            depths.append(depth)
            if depth:
                asyncio.run_coroutine_threadsafe(wait_for(depth - 1), loop).result(20)

        await asyncio.gather(*(slots.run(work, 10) for _ in range(4)))
        assert sorted(depths) == sorted([*range(11)] * 4)

    run(scenario, count)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_place_that_was_lent_is_one_place_again(count: int) -> None:
    work = Work()

    async def scenario(slots: LoadSlots) -> None:
        lenders = [asyncio.ensure_future(slots.run(work)) for _ in range(count)]
        await until(lambda: work.running == count)
        with slots.lent():
            guest = asyncio.ensure_future(slots.run(work))
            await until(lambda: work.running == count + 1)
        work.gate.set()
        await asyncio.gather(guest, *lenders)
        work.gate.clear()
        work.most = 0
        many = asyncio.gather(*(slots.run(work) for _ in range(6)))
        await until(lambda: work.running == count)
        work.gate.set()
        await many
        assert work.most == count

    run(scenario, count)


def test_error_of_work_is_raised_and_frees_its_place() -> None:
    async def scenario(slots: LoadSlots) -> None:
        for _ in range(3):
            with pytest.raises(ValueError, match="invalid literal"):
                await slots.run(int, "x")
        assert await slots.run(int, "7") == 7

    run(scenario, 1)
