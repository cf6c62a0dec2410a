"""The bytes that all connections of one port hold: requests that arrive or run, and responses that callers have not
read.

Each connection is limited by its protocol; this limits all of them together.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Protocol

#: If too much is held, connections are ended until 1/8 of the limit is free.
_ROOM = 8
#: A caller is slow if it would take longer than 60 s, at its last rate, to move all that is held for it.
SLOW_S = 60


class Holder(Protocol):
    """A connection."""

    @property
    def waits_for_peer(self) -> bool:
        """True if some of what it holds waits for the caller to send or read more."""

    @property
    def is_slow(self) -> bool:
        """True if the caller would take more than `SLOW_S` for that."""

    def shed(self) -> None:
        """End the connection: all connections together hold too much."""


class HeldBytes:
    """The sizes of the connections that hold bytes. Event loop only.

    Beyond ``limit_bytes``, connections are ended until 1/8 of the limit is free. Only connections that wait for their
    caller are ended: slow callers first, then the largest.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes or default_limit()
        self.total_bytes = 0
        self._sizes: dict[Holder, int] = {}
        self._is_due = False

    def set(self, holder: Holder, size_bytes: int) -> None:
        """Record that ``holder`` holds ``size_bytes`` now."""
        sizes = self._sizes
        self.total_bytes += size_bytes - sizes.get(holder, 0)
        if size_bytes:
            sizes[holder] = size_bytes
            if self.total_bytes > self.limit_bytes and not self._is_due:
                self._is_due = True
                asyncio.get_running_loop().call_soon(self._make_room)
        else:
            sizes.pop(holder, None)

    def _make_room(self) -> None:
        """End connections. Runs one turn of the loop later, so that no connection ends inside its own call."""
        self._is_due = False
        waiting = [holder for holder in self._sizes if holder.waits_for_peer]
        waiting.sort(key=lambda holder: (holder.is_slow, self._sizes[holder]))
        wanted = self.limit_bytes - self.limit_bytes // _ROOM
        while waiting and self.total_bytes > wanted:
            holder = waiting.pop()
            holder.shed()
            self.set(holder, 0)


def default_limit() -> int:
    """Return a quarter of the memory that this process may use."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        text = "max"
    return min(memory, int(text)) // 4 if text.isdigit() else memory // 4
