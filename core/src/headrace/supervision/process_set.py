"""A fixed number of processes of one kind: one that exits is replaced."""

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
    """Keeps ``count`` processes running. ``make`` makes the process of a number: at first, and when it is replaced,
    with the delays of a `RestartPolicy`. ``processes`` are the current ones. Event loop only."""

    def __init__(self, count: int, make: Callable[[int], P]) -> None:
        self.processes = [make(number) for number in range(count)]
        self._make = make
        self._keepers: list[asyncio.Task[None]] = []
        self._is_ending = False

    async def start(self) -> None:
        """Start all processes; return when all have started. Raises the first error of a process that cannot start."""
        await asyncio.gather(*(process.start() for process in self.processes if not process.has_started))

    def keep(self) -> None:
        """From now on, replace each process that exits."""
        self._keepers = [asyncio.ensure_future(self._keep(number)) for number in range(len(self.processes))]

    async def drain(self) -> None:
        """Let all finish their requests, and return when they have exited."""
        self._stop_replacing()
        for process in self.processes:
            process.drain()
        await asyncio.gather(*(process.ended.wait() for process in self.processes))

    def end(self) -> None:
        """Kill all processes that still run."""
        self._stop_replacing()
        for process in self.processes:
            process.kill("was not needed any more")

    def _stop_replacing(self) -> None:
        self._is_ending = True
        for keeper in self._keepers:
            keeper.cancel()

    async def _keep(self, number: int) -> None:
        policy = RestartPolicy()
        # The flag, because a cancellation is lost if the awaited event is set in the same turn (asyncio.wait_for).
        while not self._is_ending:
            await self.processes[number].ended.wait()
            log.error("%s; its connections are lost", self.processes[number].reason)
            policy.add_exit()
            await asyncio.sleep(policy.delay_s)
            name = self.processes[number].name
            try:
                process = self.processes[number] = self._make(number)
                await process.start()
            except Exception as error:  # for example, no descriptor is left: a later attempt may succeed
                log.error("%s could not be restarted: %s", name, summary(error))
                self.processes[number].kill("could not be started")
            else:
                log.warning("%s has been restarted", name)
