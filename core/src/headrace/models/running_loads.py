"""Running loads: their slots, their progress, and the loads that a model requests while it is loaded itself.

Event loop only, except `Progress.began`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from anyio import CapacityLimiter

from headrace.errors import HeadraceError, InvalidArgument, Unavailable
from headrace.executors.threads import run_on_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Waits for work that runs on a thread.
Wait: TypeAlias = "Callable[[asyncio.Future[T]], Awaitable[T]]"
#: A slow load is logged every 10 s.
INTERVAL_S = 10.0


class LoadSlots:
    """Runs work on threads, at most ``count`` at once. Other work waits.

    A load that waits for another load lends its slot meanwhile. Otherwise loads that wait could fill all slots forever.
    """

    def __init__(self, count: int) -> None:
        self._slots = CapacityLimiter(max(1, count))
        self._is_closed = False

    async def run(
        self, function: Callable[..., T], *arguments: Any, wait: Wait[T] | None = None, is_reused: bool = False
    ) -> T:
        """Run ``function`` on a thread when there is a slot. Return or raise its outcome.

        ``wait`` gets the future of the outcome. When it returns or raises, the slot is free, even if the thread still
        runs. ``is_reused`` is that of `run_on_thread`.
        """
        async with self._slots:
            if self._is_closed:
                raise Unavailable("the server is stopping")
            running = run_on_thread(partial(function, *arguments), "headrace-load", is_reused=is_reused)
            return await (running if wait is None else wait(running))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the slot of the current work while that waits for other work.

        It is taken back at once, without waiting for a free slot.
        """
        self._slots.total_tokens += 1
        try:
            yield
        finally:
            self._slots.total_tokens -= 1

    def close(self) -> None:
        """Start no more work. Running work continues."""
        self._is_closed = True


class NestedLoads:
    """Loads and unloads that models request while they are being loaded themselves.

    Records which models wait for which, and refuses a circle. While one waits, its slot of ``slots`` is lent to others.
    """

    def __init__(self, slots: LoadSlots) -> None:
        self._slots = slots
        self._waiting: dict[str, list[str]] = {}

    async def run(self, asker: str, target: str, work: Callable[[], Awaitable[None]]) -> None:
        """Await ``work`` on ``target``, for which the load of ``asker`` waits.

        Raises as `waiting`, and what ``work`` raises.
        """
        with self.waiting(asker, target), self._slots.lent():
            await work()

    @contextmanager
    def waiting(self, asker: str, target: str) -> Iterator[None]:
        """Record that the load of ``asker`` waits for ``target``.

        Raises `InvalidArgument` with the path if the load of ``target`` waits for that of ``asker``.
        """
        if path := self.path(target, asker):
            shown = " -> ".join(f"'{name}'" for name in (asker, *path))
            raise InvalidArgument(f"model '{asker}' is being loaded, and would wait for itself: {shown}")
        targets = self._waiting.setdefault(asker, [])
        targets.append(target)
        try:
            yield
        finally:
            targets.remove(target)
            if not targets:
                self._waiting.pop(asker, None)

    def askers(self, target: str) -> list[str]:
        """Return the models whose loads wait for ``target``."""
        return [asker for asker, targets in self._waiting.items() if target in targets]

    def path(self, start: str, end: str) -> list[str]:
        """Return the models from ``start`` to ``end`` of which each waits for the next; empty if there is no path."""
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop()
            if way[-1] == end:
                return way
            further = [name for name in self._waiting.get(way[-1], ()) if name not in seen]
            seen.update(further)
            ways += ([*way, name] for name in further)
        return []


class Background:
    """Tasks on models that run to their end even if no caller waits for them.

    Unexpected exceptions are logged.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def start(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> asyncio.Future[T]:
        """Begin ``work``. A caller that awaits the future must shield it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def settle(self) -> None:
        """Wait until no task is left, including tasks that start meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, HeadraceError):
            log.error("unexpected error while loading or unloading", exc_info=error)


class Progress:
    """The progress of a load of ``names``, from the entry of this context to its end.

    Logs one line per loaded model. Also logs one line every `INTERVAL_S` seconds with the model that takes longest, so
    that a load that hangs is found. ``attempts`` are the loads that belong to it, by name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.attempts: dict[str, asyncio.Future[HeadraceError | None]] = {}
        self._count = len(list(names))
        self._start = monotonic()
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._failed = 0
        self._next: asyncio.TimerHandle | None = None

    def join(self, name: str, attempt: asyncio.Future[HeadraceError | None]) -> None:
        """Add ``attempt``, which loads ``name`` as a dependency of another one."""
        self.attempts[name] = attempt
        self._count += 1

    def began(self, name: str) -> None:
        """Record that a thread has begun to load ``name``. Any thread; only the first call counts."""
        self._began.setdefault(name, monotonic())

    def loaded(self, name: str) -> None:
        """Record and log that ``name`` is loaded."""
        seconds = self._took[name] = self._seconds(name)
        self._began.pop(name, None)
        of_all = f", {len(self._took)} of {self._count}" if self._count > 1 else ""
        log.info("successfully loaded '%s' in %.1f s%s", name, seconds, of_all)

    def failed(self, name: str) -> None:
        """Record that no version of ``name`` could be loaded. The reason is logged elsewhere."""
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
        self._next = asyncio.get_running_loop().call_later(INTERVAL_S, self._log_progress)

    def _log_progress(self) -> None:
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
