"""Log lines and access records that wait to be sent: at most `MAX_WAITING`, the others are counted. Any thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

#: Records that wait. A line has at most 16 KiB, and most have 200 bytes.
MAX_WAITING: Final = 8192


class RecordQueue:
    """``add`` never blocks. ``dropped`` counts the records that found no room."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, ...]] = deque()
        self.dropped = 0
        self.has_many = threading.Event()

    def add(self, record: tuple[Any, ...]) -> None:
        waiting = self._waiting
        if len(waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        waiting.append(record)
        if len(waiting) == MAX_WAITING // 4:
            self.has_many.set()

    def pop(self, limit: int) -> list[tuple[Any, ...]]:
        """Remove and return the oldest records, at most ``limit``."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(len(waiting), limit))]
