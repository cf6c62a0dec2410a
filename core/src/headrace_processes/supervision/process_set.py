"""A fixed number of processes of one kind: one that exits is replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from headrace.errors import summary
from headrace_processes.supervision.exits import RestartPolicy
from headrace_processes.supervision.supervised_process import SupervisedProcess

log = logging.getLogger(__name__)

P = TypeVar("P", bound=SupervisedProcess)


class ProcessSet(Generic[P]):
    """Keeps ``count`` processes running. ``make`` returns a new process for a number: at the start, and when one exits,
    with the delays of a `RestartPolicy`. ``processes`` are the current ones. Event loop only."""

    def __init__(self, count: int, make: Callable[[int], P]) -> None:
        self.processes = [make(number) for number in range(count)]
        self._make = make

    async def start(self) -> None:
        """Start all processes; return when all have started. Raises the first error of a process that cannot start."""
        errors: list[Exception] = []

        async def start(process: P) -> None:
            try:
                await process.start()
            except Exception as error:
                errors.append(error)
                starts.cancel_scope.cancel()

        async with anyio.create_task_group() as starts:
            for process in self.processes:
                if not process.has_started:
                    starts.start_soon(start, process)
        if errors:
            raise errors[0]

    async def keep(self) -> None:
        """Replace each process that exits, until the cancel scope around it ends. Call `drain` and `end` only then."""
        async with anyio.create_task_group() as keepers:
            for number in range(len(self.processes)):
                keepers.start_soon(self._keep, number)

    async def drain(self) -> None:
        """Let all finish their requests, and return when they have exited."""
        for process in self.processes:
            process.drain()
        for process in self.processes:
            await process.ended.wait()

    def end(self) -> None:
        """Kill all processes that still run."""
        for process in self.processes:
            process.kill("was not needed any more")

    async def _keep(self, number: int) -> None:
        policy = RestartPolicy()
        while True:
            await self.processes[number].ended.wait()
            log.error("%s; its connections are lost", self.processes[number].reason)
            policy.add_exit()
            await anyio.sleep(policy.delay_s)
            name = self.processes[number].name
            try:
                process = self.processes[number] = self._make(number)
                await process.start()
            except Exception as error:  # for example, no descriptor is left: a later attempt may succeed
                log.error("%s could not be restarted: %s", name, summary(error))
                self.processes[number].kill("could not be started")
            else:
                log.warning("%s has been restarted", name)
