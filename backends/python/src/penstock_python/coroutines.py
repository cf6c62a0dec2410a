"""The asyncio loop of one instance, for a model with an ``async`` method."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

#: How long a cancelled task may take to end when its instance is closed.
_CLOSING_S = 5.0


class Coroutines:
    """A loop on a thread of its own, begun when the first coroutine comes.

    Coroutines inherit the context (`contextvars`) of the thread that hands them over.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What ``coroutine`` returns, waited for; raises what it raises."""
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin ``coroutine`` and return at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSING_S)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:  # is_ready comes on a thread of its own
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                run = _running_until_stopped(self._loop)
                self._thread = threading.Thread(target=run, name=f"{self._name}-asyncio", daemon=True)
                self._thread.start()
            return self._loop


def _running_until_stopped(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSING_S))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    return run
