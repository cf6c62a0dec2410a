"""The end of a model that takes no more requests (docs/spec/behaviours.md section 5.5). Event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.models import scratch
from headrace.models.served import ServedModel
from headrace.models.states import UNLOADED, State, VersionRecord
from headrace.telemetry.verbosity import VERBOSE_2
from headrace.workers.apart import apart

log = logging.getLogger(__name__)


class Leaving(NamedTuple):
    """A model on its way out, and the record that is told when it is gone."""

    record: VersionRecord
    model: ServedModel


async def retire(leaving: Iterable[Leaving], private: Path | None, unloaded: Callable[[ServedModel], None]) -> None:
    """Let models answer what they have, close them, and remove the directory that only they needed.

    ``unloaded`` is called for each, on the thread that has waited for its end. What fails is logged: a
    model whose end goes wrong is gone all the same, and keeps no other from ending.
    """
    try:
        await asyncio.gather(*(_retire_one(each, unloaded) for each in leaving))
    finally:
        if private is not None:
            await asyncio.to_thread(scratch.remove, private)


async def _retire_one(leaving: Leaving, unloaded: Callable[[ServedModel], None]) -> None:
    record, model = leaving
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
