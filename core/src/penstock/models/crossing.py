"""The way from a model's threads to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class Crossing:
    """Calls on ``loop`` what it is given, in order. However much comes before the loop looks, it wakes once.

    ``loop`` runs on the thread that makes this.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread = threading.get_ident()
        self._waiting: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_waking = False

    def send(self, call: Callable[..., object], *arguments: object) -> bool:
        """Call soon, never before this returns. Any thread, the loop's too. False if the loop has ended."""
        self._waiting.append((call, arguments))
        if self._is_waking:
            return True
        self._is_waking = True
        is_there = threading.get_ident() == self._thread
        try:
            (self.loop.call_soon if is_there else self.loop.call_soon_threadsafe)(self._cross)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            return False
        return True

    def _cross(self) -> None:
        self._is_waking = False  # first: whoever sends from here on wakes the loop again
        for _ in range(len(self._waiting)):  # what comes meanwhile has to let others through
            call, arguments = self._waiting.popleft()
            try:
                call(*arguments)
            except Exception:
                log.exception("a call from a model's thread failed")
