"""How many loads run at the same time. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from headrace.workers.apart import contained

T = TypeVar("T")

#: Threads are made as they are needed: one for each place, and one for each load that has lent its own.
_MOST_THREADS = 4096


class Places:
    """Work on threads, ``count`` of it at once; the rest waits its turn.

    A load that waits for another lends its place meanwhile: else as many of these as there are
    places would wait for ever.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(max(1, count))
        #: Places that have been taken back while all were in use: so many are not passed on.
        self._owed = 0
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="headrace-load")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What ``function`` returns or raises, on a thread, once there is a place."""
        await self._free.acquire()
        try:
            work = partial(contained, partial(function, *arguments))
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._give()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Let others have a place while the work that holds it waits for them.

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
