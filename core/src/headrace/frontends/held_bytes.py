"""What all connections of one port make the server hold, in bytes: requests that arrive or are in flight, and answers
that their callers have not taken. One connection is bounded by its protocol; this bounds all of them together."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Protocol

#: When too much is held, connections are ended until this part of the limit is left free.
_ROOM = 8
#: A caller that would need longer to move all that is held for it, at the rate of the last sweep, is slow.
SLOW_S = 60


class Holder(Protocol):
    """A connection."""

    @property
    def waits_for_peer(self) -> bool:
        """True if some of what it holds waits for the caller, who has to send or to take more."""

    @property
    def is_slow(self) -> bool:
        """True if the caller would need more than `SLOW_S` for what waits for it."""

    def shed(self) -> None:
        """End the connection: all connections together hold too much."""


class HeldBytes:
    """The sizes of the connections that hold something large. The event loop's.

    Beyond ``limit_bytes``, connections end until there is room again: first those whose callers are slow, of these and
    of the others first the ones that hold most. A connection that holds little never ends for those that hold much.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes or default_limit()
        self.total_bytes = 0
        self._sizes: dict[Holder, int] = {}
        self._is_due = False

    def set(self, holder: Holder, size_bytes: int) -> None:
        """Note that ``holder`` holds ``size_bytes`` now."""
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
        """A turn of the loop later: a connection does not end inside of what it is doing."""
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
