"""Work on models that goes on whether or not anybody still waits for it. Event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from headrace.errors import HeadraceError

log = logging.getLogger(__name__)


class Background:
    """Tasks that nobody cancels; what they raise unexpectedly is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin ``work``. Whoever awaits the task must shield it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def settle(self) -> None:
        """Wait until nothing is left, also of what begins meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, HeadraceError):
            log.error("unexpected error while loading or unloading", exc_info=error)
