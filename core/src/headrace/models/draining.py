"""The end of a model that takes no more requests (docs/spec/behaviours.md section 5.5), and the time it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from headrace.models import overrides
from headrace.models.served import ServedModel
from headrace.models.states import UNLOADED, State, VersionRecord
from headrace.telemetry.logs import VERBOSE_2
from headrace.workers.apart import apart

log = logging.getLogger(__name__)

#: Of the time that the server has to stop, or that is left of it. The rest is for killing.
_PART = 0.8


class ShutdownDeadline:
    """How long an instance in a process may take to close before it is killed.

    ``exit_timeout_s`` is how long the server may take to stop.
    """

    def __init__(self, exit_timeout_s: float) -> None:
        self._whole_s = exit_timeout_s
        self._ends: float | None = None

    def stopping(self) -> None:
        """The server has begun to stop: its time runs, and that of every instance with it."""
        self._ends = monotonic() + self._whole_s

    def __call__(self) -> float:
        """Seconds for an instance that is to close from now on."""
        left_s = self._whole_s if self._ends is None else self._ends - monotonic()
        return _PART * max(left_s, 0.0)


class Draining(NamedTuple):
    """A model on its way out, and the record that is told when it is gone."""

    record: VersionRecord
    model: ServedModel


async def drain(draining: Iterable[Draining], directory: Path | None, unloaded: Callable[[ServedModel], None]) -> None:
    """Let models answer what they have, close them, and remove the ``directory`` that only they needed.

    ``unloaded`` is called for each, on the thread that has waited for its end. What fails is logged: a
    model whose end goes wrong is gone all the same, and keeps no other from ending. Event loop only.
    """
    try:
        await asyncio.gather(*(_drain_one(each, unloaded) for each in draining))
    finally:
        if directory is not None:
            await asyncio.to_thread(overrides.remove, directory)


async def _drain_one(draining: Draining, unloaded: Callable[[ServedModel], None]) -> None:
    record, model = draining
    try:
        await model.drain()
    except Exception:
        log.exception("'%s' version %d did not wait for its requests", model.name, model.version)
    try:
        model.close()
        await apart(partial(_end, model, unloaded), f"headrace-close-{model.name}")  # may take as long as it likes
        log.log(VERBOSE_2, "OnDestroy callback() '%s' version %d", model.name, model.version)
        log.info("successfully unloaded '%s' version %d", model.name, model.version)
    except Exception:
        log.exception("'%s' version %d did not close in order", model.name, model.version)
    record.state, record.reason = State.UNAVAILABLE, UNLOADED


def _end(model: ServedModel, unloaded: Callable[[ServedModel], None]) -> None:
    try:
        model.join()
    finally:
        unloaded(model)
