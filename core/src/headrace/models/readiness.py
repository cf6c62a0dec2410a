"""The readiness of a version's instances. ``is_ready`` of each is called on a thread of its own.

Source: docs/spec/behaviours.md section 9.7.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence

from headrace.errors import summary
from headrace.executors.executor import Executor

log = logging.getLogger(__name__)

#: An ``is_ready`` that takes longer counts as not ready.
TIMEOUT_S = 5.0


class Readiness:
    """Calls the ``is_ready`` of each of ``executors`` that has one. Costs nothing if none has."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._checks = [_ReadinessCheck(executor) for executor in executors if executor.has_check]

    @property
    def has_checks(self) -> bool:
        return bool(self._checks)

    async def check(self) -> bool:
        """True if all are ready within `TIMEOUT_S`."""
        return all(await asyncio.gather(*(check.ask() for check in self._checks)))


class _ReadinessCheck:
    """The check of one executor, one call at a time. Simultaneous callers share the result."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._answer: asyncio.Future[bool] | None = None
        self._reason = ""

    async def ask(self) -> bool:
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            threading.Thread(target=self._run, args=(self._answer,), name="headrace-ready", daemon=True).start()
        done, _ = await asyncio.wait((self._answer,), timeout=TIMEOUT_S)
        if not done:
            self._note("Timed out waiting for user-defined is_ready() response")
        return any(answer.result() for answer in done)

    def _run(self, answer: asyncio.Future[bool]) -> None:
        """Call ``is_ready``, which may take any time, on a thread of its own."""
        try:
            reason = "" if self._executor.check_ready() else "user-defined check failed"
        except BaseException as error:  # SystemExit of a model means not ready, too
            reason = summary(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits for the result
            answer.get_loop().call_soon_threadsafe(self._settle, answer, reason)

    def _settle(self, answer: asyncio.Future[bool], reason: str) -> None:
        self._answer = None
        self._note(reason)
        answer.set_result(not reason)

    def _note(self, reason: str) -> None:
        """Log only changes: readiness is polled every few seconds."""
        if reason and reason != self._reason:
            log.warning("Model '%s' is not ready: %s", self._executor.name, reason)
        elif self._reason and not reason:
            log.info("Model '%s' is ready again", self._executor.name)
        self._reason = reason
