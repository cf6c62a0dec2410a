"""One thread per process that frees unused device memory: to free it may mean to wait for the device.

A finalizer may run on any thread, even that of the event loop, and must not wait. So it posts a job here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Protocol

log = logging.getLogger(__name__)

#: Memory that has been unused for `IDLE_S` to twice `IDLE_S` seconds is freed.
IDLE_S: Final = 2.5


class Trimmable(Protocol):
    """An owner of device memory."""

    def trim(self) -> bool:
        """Free the memory that was not used since the last call. Return True if a later call may free more."""


class Reclaimer:
    """Runs jobs in the order in which they were posted. The thread starts with the first `watch` or `start`."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._watched: dict[Trimmable, None] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it is not running."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="headrace-reclaim", daemon=True)
                self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job`` soon. Any thread; safe in a finalizer. Its errors are logged."""
        self._jobs.put(job)

    def watch(self, owner: Trimmable) -> None:
        """Call ``owner.trim`` every `IDLE_S` seconds until it returns False."""
        self.post(lambda: self._watched.setdefault(owner))

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S if self._watched else None)
            except Empty:
                job = self._trim
            try:
                job()
            except Exception:
                log.exception("failed to free memory of a device")
            del job  # it may reference the memory

    def _trim(self) -> None:
        for each in tuple(self._watched):
            if not each.trim():
                del self._watched[each]


#: The reclaimer of this process.
RECLAIMER: Final = Reclaimer()
