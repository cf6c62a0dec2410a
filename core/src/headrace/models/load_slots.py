"""How many loads run at the same time, and what a model may load while it is being loaded. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from headrace.errors import InvalidArgument
from headrace.workers.apart import contained

T = TypeVar("T")

#: Threads are made as they are needed: one for each slot, and one for each load that has lent its own.
_MOST_THREADS = 4096


class LoadSlots:
    """Work on threads, ``count`` of it at once; the rest waits its turn.

    A load that waits for another lends its place meanwhile: else as many of these as there are
    slots would wait for ever.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(max(1, count))
        #: LoadSlots that have been taken back while all were in use: so many are not passed on.
        self._owed = 0
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="headrace-load")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What ``function`` returns or raises, on a thread, once there is a slot."""
        await self._free.acquire()
        try:
            work = partial(contained, partial(function, *arguments))
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._give()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Let others have a slot while the work that holds it waits for them.

        It is taken back without waiting, so that nobody pays for having waited with more of it.
        """
        self._free.release()
        try:
            yield
        finally:
            if self._free.locked():
                self._owed += 1
            else:
                await self._free.acquire()

    def close(self) -> None:
        """Begin nothing any more; what runs goes on."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _give(self) -> None:
        if self._owed:
            self._owed -= 1
        else:
            self._free.release()


class NestedLoads:
    """Loads and unloads that models ask for while they are being loaded themselves.

    Knows which models, not loaded yet, wait for which, and refuses what they would wait for in a
    circle. While one waits, its slot of ``slots`` is lent to others.
    """

    def __init__(self, slots: LoadSlots) -> None:
        self._slots = slots
        self._waiting: dict[str, list[str]] = {}

    async def run(self, asker: str, target: str, work: Callable[[], Awaitable[None]]) -> None:
        """Await ``work`` on ``target``, for which the load of ``asker`` waits.

        Raises `InvalidArgument` naming the path if the load of ``target`` waits for that of
        ``asker``, and what ``work`` raises.
        """
        if path := self._path(target, asker):
            shown = " -> ".join(f"'{name}'" for name in (asker, *path))
            raise InvalidArgument(f"model '{asker}' is being loaded, and would wait for itself: {shown}")
        targets = self._waiting.setdefault(asker, [])
        targets.append(target)
        try:
            async with self._slots.lent():
                await work()
        finally:
            targets.remove(target)
            if not targets:
                self._waiting.pop(asker, None)

    def _path(self, start: str, end: str) -> list[str]:
        """The models from ``start`` on of which each waits for the next, up to ``end``; empty if there is no way."""
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop()
            if way[-1] == end:
                return way
            further = [name for name in self._waiting.get(way[-1], ()) if name not in seen]
            seen.update(further)
            ways += ([*way, name] for name in further)
        return []
