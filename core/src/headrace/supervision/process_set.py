"""Processes of one kind that are kept running: one that ends is followed by another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.errors import summary
from headrace.supervision.exits import RestartPolicy
from headrace.supervision.supervised_process import SupervisedProcess

log = logging.getLogger(__name__)

P = TypeVar("P", bound=SupervisedProcess)


class ProcessSet(Generic[P]):
    """``count`` processes, which ``make`` makes by their numbers: at first, and whenever one has ended; at once the
    first time, then later and later. ``processes`` are those of now. Event loop only."""

    def __init__(self, count: int, make: Callable[[int], P]) -> None:
        self.processes = [make(number) for number in range(count)]
        self._make = make
        self._keepers: list[asyncio.Task[None]] = []
        self._is_ending = False

    async def start(self) -> None:
        """Returns once all have started. Raises what the first says that cannot start."""
        await asyncio.gather(*(process.start() for process in self.processes if not process.has_started))

    def keep(self) -> None:
        """From now on, have another follow each that ends."""
        self._keepers = [asyncio.ensure_future(self._keep(number)) for number in range(len(self.processes))]

    async def drain(self) -> None:
        """Have all answer what they have, and return when they have ended."""
        self._let_go()
        for process in self.processes:
            process.drain()
        await asyncio.gather(*(process.ended.wait() for process in self.processes))

    def end(self) -> None:
        """Leave nothing behind: kill those that still run."""
        self._let_go()
        for process in self.processes:
            process.condemn("was not needed any more")

    def _let_go(self) -> None:
        """Replace nobody any more."""
        self._is_ending = True
        for keeper in self._keepers:
            keeper.cancel()

    async def _keep(self, number: int) -> None:
        policy = RestartPolicy()
        while not self._is_ending:  # a cancellation is lost when what was waited for has just come (asyncio.wait_for)
            await self.processes[number].ended.wait()
            log.error("%s; its connections are lost", self.processes[number].reason)
            policy.add_exit()
            await asyncio.sleep(policy.delay_s)
            name = self.processes[number].name
            try:
                process = self.processes[number] = self._make(number)
                await process.start()
            except Exception as error:  # no descriptors are left, say: later there may be
                log.error("%s could not be restarted: %s", name, summary(error))
                self.processes[number].condemn("could not be started")
            else:
                log.warning("%s has been restarted", name)
