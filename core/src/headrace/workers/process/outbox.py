"""What a child still has to say, in order, from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Outbox:
    """Runs jobs one at a time, in the order in which they were posted, on the threads that post.

    A finalizer may post in the middle of a job of its own thread: then, as for any thread that
    finds another at work, the job is left to whoever is at it. So nothing waits for a lock here.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()

    def post(self, job: Callable[[], None]) -> None:
        """Have ``job`` done, usually before this returns. It must not raise."""
        self._jobs.append(job)
        # Looked at again after each release: a job may have come while the turn was being given up.
        while self._jobs and self._turn.acquire(blocking=False):
            try:
                while self._jobs:
                    self._jobs.popleft()()
            finally:
                self._turn.release()
