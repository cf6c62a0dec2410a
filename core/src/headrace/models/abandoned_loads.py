"""Loads that exceed their time limit. A thread cannot be ended, so it is abandoned, counted, and limited.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from headrace.errors import LoadError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: At most this many abandoned threads per model. Then it is not loaded again until one of them has ended.
MOST = 3
#: A load may continue for this many seconds after an unload of its model, or a stop of the server.
GRACE_S = 5.0


class AbandonedLoads:
    """Limits the time of loads, and counts the threads that were abandoned."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        #: Futures that end the wait for running loads, by model.
        self._waits: dict[str, set[asyncio.Future[str]]] = {}

    @property
    def has_any(self) -> bool:
        return self._count.total() > 0

    def has(self, name: str) -> bool:
        """True if an abandoned load of ``name`` has not ended."""
        return self._count[name] > 0

    def refuse(self, name: str) -> None:
        """Raise `LoadError` if ``name`` has `MOST` abandoned loads."""
        if self._count[name] >= MOST:
            raise LoadError(
                f"model '{name}' is not loaded: {self._count[name]} threads of earlier loads have not ended, and a "
                "thread cannot be ended. Restart the server, or give the model a process, which is killed: "
                'parameters { key: "isolation" value { string_value: "process" } }'
            )

    async def wait(
        self, name: str, timeout_s: float | None, setting: str, late: Callable[[T], object], running: asyncio.Future[T]
    ) -> T:
        """Return or raise the outcome of ``running``, a load of ``name`` on a thread.

        Raises `LoadError` after ``timeout_s`` (from ``setting``), and `GRACE_S` after `end_soon`. The thread is then
        abandoned, and ``late`` is called with its result.
        """
        waits = self._waits.setdefault(name, set())
        abandoned = asyncio.get_running_loop().create_future()
        waits.add(abandoned)
        try:
            await asyncio.wait((running, abandoned), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.discard(abandoned)
            if not waits:
                self._waits.pop(name, None)
        if running.done():
            return running.result()
        self._count[name] += 1
        running.add_done_callback(lambda _: self._ended(name, late, running))
        why = abandoned.result() if abandoned.done() else f"did not load within {timeout_s:g} s ({setting})"
        raise LoadError(f"model '{name}' {why}; its thread, which cannot be ended, is left behind")

    def end_soon(self, name: str, why: str) -> None:
        """Abandon the loads of ``name`` that have not ended after `GRACE_S`. ``why`` completes "the model ..."."""
        loop = asyncio.get_running_loop()
        for abandoned in self._waits.get(name, ()):
            loop.call_later(GRACE_S, _abandon, abandoned, why)

    def end_all_soon(self, why: str) -> None:
        """`end_soon` for all models."""
        for name in tuple(self._waits):
            self.end_soon(name, why)

    def _ended(self, name: str, late: Callable[[T], object], running: asyncio.Future[T]) -> None:
        self._count[name] -= 1
        self._count += Counter()  # drops zero counts: clients choose names
        error = None if running.cancelled() else running.exception()
        log.info("a load of '%s' that was abandoned has ended%s", name, f": {error}" if error is not None else "")
        if error is None and not running.cancelled():
            late(running.result())


def _abandon(abandoned: asyncio.Future[str], why: str) -> None:
    if not abandoned.done():
        abandoned.set_result(why)
