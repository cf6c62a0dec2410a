"""Work on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(result)
