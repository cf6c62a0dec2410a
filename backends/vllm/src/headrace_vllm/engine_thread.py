"""vLLM's engine on a thread of its own, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from time import monotonic
from typing import Any, Final

from headrace import LoadError, Unavailable, one_line

log = logging.getLogger("headrace.vllm")

#: The interval, in seconds, of the checks that the engine lives. A request that finds it dead reports it at once.
_CHECK_S: Final = 0.25
#: The pause before the first start after a death, and the longest, in seconds. It doubles from one to the other, and is
#: the first again after an engine that has lived for a minute.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONG_LIFE_S = 1.0, 60.0, 60.0


class EngineThread:
    """An ``AsyncLLM``, whose own engine is in a process of its own, and the thread with its event loop.

    ``start`` returns an ``AsyncLLM``, on that loop, which it may block; ``died`` is called there with the reason.
    Returns when the first has started. Raises `LoadError` if it does not start.
    """

    def __init__(self, name: str, start: Callable[[], Awaitable[Any]], died: Callable[[Unavailable], None]) -> None:
        self._name, self._start, self._died = name, start, died
        self._client: Any = None
        self._why_not = f"the vLLM engine of model '{name}' is starting"
        self._loop = _new_loop()
        self._wake = asyncio.Event()
        self._is_closing = False
        self._tasks: dict[object, asyncio.Task[None]] = {}
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"{name} vLLM", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            raise

    @property
    def client(self) -> Any:
        """The ``AsyncLLM``. Raises `Unavailable` with the reason while there is none. Any thread."""
        client = self._client
        if client is None:
            raise Unavailable(self._why_not)
        return client

    def submit(self, key: object, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` on the loop, as a task that `cancel` finds by ``key``. Any thread."""
        self._loop.call_soon_threadsafe(self._begin, key, work)

    def cancel(self, key: object) -> None:
        """Cancel the work of ``key``, if it has not ended. Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is all work
            self._loop.call_soon_threadsafe(self._cancel, key)

    def check(self) -> None:
        """Check at once if the engine has died. On the loop."""
        self._wake.set()

    def close(self) -> None:
        """Stop the engine; work that is not done is cancelled."""
        self._is_closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join()

    def _begin(self, key: object, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[key] = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _cancel(self, key: object) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()

    def _run(self, started: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(started))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        except BaseException as error:
            log.exception("the thread of the vLLM engine of model '%s' has ended", self._name)
            if not started.done():
                started.set_exception(error)
        finally:
            self._client = None
            self._loop.close()

    async def _serve(self, started: Future[None]) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            born = monotonic()
            try:
                client = await self._start()
            except Exception as error:
                if not started.done():
                    started.set_exception(_load_error(self._name, error))
                    return
                log.exception("the vLLM engine of model '%s' does not start", self._name)
            else:
                self._client = client
                if started.done():
                    log.warning("the vLLM engine of model '%s' has started again", self._name)
                else:
                    started.set_result(None)
                await self._watch(client)
                if self._is_closing:
                    self._why_not = f"model '{self._name}' is being unloaded"
                else:
                    self._why_not = f"the vLLM engine of model '{self._name}' has died; it is being started again"
                    log.error("%s", self._why_not)
                self._client = None
                self._died(Unavailable(self._why_not))
                await self._end_work()
                client.shutdown()
            if self._is_closing:
                return
            if monotonic() - born > _LONG_LIFE_S:
                pause_s = _FIRST_PAUSE_S
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing(), pause_s)
                return
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _watch(self, client: Any) -> None:
        """Return when ``client`` has died or `close` is called."""
        while not (self._is_closing or client.errored):
            self._wake.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _CHECK_S)

    async def _closing(self) -> None:
        while not self._is_closing:
            self._wake.clear()
            await self._wake.wait()

    async def _end_work(self) -> None:
        """Cancel all work. Its callers have received an error."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop as vLLM's own server has it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _load_error(name: str, error: Exception) -> Exception:
    text = one_line(str(error)) or type(error).__name__
    return error if isinstance(error, LoadError) else LoadError(f"vLLM does not start model '{name}': {text}")
