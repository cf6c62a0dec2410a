"""Work on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from headrace.errors import InternalError, summary

log = logging.getLogger(__name__)

T = TypeVar("T")


async def apart(work: Callable[[], T], name: str) -> T:
    """What ``work`` returns or raises, from a thread ``name`` that it shares with nobody.

    For what may take for ever: it keeps no thread from others, and neither the loop nor the
    interpreter waits for it at its end.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # nobody can take it back

    def run() -> None:
        try:
            result.set_result(contained(work))
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(result)


def contained(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, where what is no `Exception` becomes an `InternalError`.

    For threads that work for the event loop: a `SystemExit` that is passed on to a task ends the loop, and a
    `CancelledError` looks like the task's own.
    """
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        log.error("a thread of the server ended by %s", summary(error), exc_info=error)
        raise InternalError(summary(error)) from error
