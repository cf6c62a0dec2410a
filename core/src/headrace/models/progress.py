"""Work on models that goes on whether or not anybody still waits for it, and how far a load has come, for the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from time import monotonic
from types import TracebackType
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


#: How often a load that takes long is told of.
INTERVAL_S = 10.0


class Progress:
    """The load of ``names``, from the entry of this context to its end. Event loop only, except `began`.

    One line for each model that is loaded, and one every `INTERVAL_S` seconds that names the model
    which takes longest: that is how a load that hangs is seen.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._count = len(list(names))
        self._start = monotonic()
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._failed = 0
        self._next: asyncio.TimerHandle | None = None

    def began(self, name: str) -> None:
        """A thread has begun to load ``name``. Any thread; what follows the first time counts for nothing."""
        self._began.setdefault(name, monotonic())

    def loaded(self, name: str) -> None:
        """Requests may reach ``name``."""
        seconds = self._took[name] = self._seconds(name)
        self._began.pop(name, None)
        of_all = f", {len(self._took)} of {self._count}" if self._count > 1 else ""
        log.info("successfully loaded '%s' in %.1f s%s", name, seconds, of_all)

    def failed(self, name: str) -> None:
        """Nothing of ``name`` could be loaded; why has been told."""
        self._began.pop(name, None)
        self._failed += 1

    def __enter__(self) -> Progress:
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._next is not None
        self._next.cancel()
        if self._count > 1:
            log.info("loaded %s in %.1f s%s", self._tally(), monotonic() - self._start, _longest(self._took))

    def _wait(self) -> None:
        self._next = asyncio.get_running_loop().call_later(INTERVAL_S, self._tell)

    def _tell(self) -> None:
        running = {name: self._seconds(name) for name in tuple(self._began)}
        so_far = f"{monotonic() - self._start:.0f} s, {len(running)} being loaded"
        log.info("still loading: %s loaded after %s%s", self._tally(), so_far, _longest(running))
        self._wait()

    def _seconds(self, name: str) -> float:
        return monotonic() - self._began.get(name, self._start)

    def _tally(self) -> str:
        failed = f" ({self._failed} failed)" if self._failed else ""
        return f"{len(self._took)} of {self._count} models{failed}"


def _longest(seconds: dict[str, float]) -> str:
    if not seconds:
        return ""
    name = max(seconds, key=lambda name: seconds[name])
    return f", longest: {name} ({seconds[name]:.1f} s)"
