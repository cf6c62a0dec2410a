"""The asyncio loop of one instance, for a model with an ``async`` method."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

log = logging.getLogger("headrace.python")

#: How long a cancelled task may take to end when its instance is closed.
_CLOSING_S = 5.0


class Coroutines:
    """A loop on its own thread, which the first coroutine starts.

    Coroutines inherit the context (`contextvars`) of the thread that passes them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Wait for ``coroutine``. Return or raise its outcome."""
        value, error = self.start(_outcome(coroutine)).result()
        if error is not None:
            raise error
        return value

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin ``coroutine`` and return at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def close(self) -> None:
        """Cancel the running coroutines and end the thread."""
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSING_S)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:  # is_ready is called on another thread
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name=f"{self._name}-asyncio", daemon=True
                )
                self._thread.start()
            return self._loop


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Return the result and the exception of ``coroutine``: a task that raises SystemExit would end its loop."""
    try:
        return await coroutine, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run ``loop`` until it is stopped, then end its remaining tasks."""
    asyncio.set_event_loop(loop)
    try:
        while not _is_stopped(loop):
            log.error("a task of a model has called exit; its other tasks go on")
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSING_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _is_stopped(loop: asyncio.AbstractEventLoop) -> bool:
    """Run ``loop``. Return False if a task ended it by SystemExit or KeyboardInterrupt."""
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt):
        return False
    return True
