"""One thread per process for what must wait for a device: memory of it that nobody uses any more.

A finalizer may post a job: it may run on any thread, the event loop's too, and must not wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Protocol

log = logging.getLogger(__name__)

#: Memory that has been unused for `IDLE_S` to twice `IDLE_S` seconds is given back to the device.
IDLE_S: Final = 2.5


class Idle(Protocol):
    """What gives memory back to its device when it is idle."""

    def trim(self) -> bool:
        """Give back what was not used since the last call. Return True if a later call may give back more."""


class Reclaimer:
    """Runs jobs in the order in which they were posted. The thread starts with the first `watch` or `start`."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._watched: dict[Idle, None] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="headrace-reclaim", daemon=True)
                self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job`` soon. Any thread; safe in a finalizer. An error of it is logged."""
        self._jobs.put(job)

    def watch(self, idle: Idle) -> None:
        """Call ``idle.trim`` every `IDLE_S` seconds until it returns False."""
        self.post(lambda: self._watched.setdefault(idle))

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S if self._watched else None)
            except Empty:
                job = self._trim
            try:
                job()
            except Exception:
                log.exception("failed to give back memory of a device")
            del job  # it may hold the memory

    def _trim(self) -> None:
        for each in tuple(self._watched):
            if not each.trim():
                del self._watched[each]


#: That of this process.
RECLAIMER: Final = Reclaimer()
