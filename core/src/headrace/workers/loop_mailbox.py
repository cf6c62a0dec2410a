"""The way from the threads of instances to the event loop."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable

from headrace.telemetry.pacing import paced

log = paced(__name__)


class LoopMailbox:
    """Calls on ``loop`` what it is given, in order. However much comes before the loop looks, it wakes once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_waking = False

    def send(self, call: Callable[..., object], *arguments: object) -> bool:
        """Call soon, never before this returns. Any thread, the loop's too. False if the loop has ended."""
        self._waiting.append((call, arguments))
        if self._is_waking:
            return not self.loop.is_closed()
        self._is_waking = True
        loop = self.loop
        try:
            # On the loop's own thread it is awake, and need not be written to.
            (loop.call_soon if _get_running_loop() is loop else loop.call_soon_threadsafe)(self._call_waiting)
        except RuntimeError:
            if not loop.is_closed():
                raise
            return False
        return True

    def _call_waiting(self) -> None:
        self._is_waking = False  # first: whoever sends from here on wakes the loop again
        for _ in range(len(self._waiting)):  # what comes meanwhile has to let others through
            call, arguments = self._waiting.popleft()
            try:
                call(*arguments)
            except KeyboardInterrupt:
                self.send(_nothing)  # wakes the loop for those behind it, if it goes on
                raise
            except BaseException:
                log.exception("a call from a model's thread failed")


def _nothing() -> None:
    """What is sent for the sake of the wake-up."""
