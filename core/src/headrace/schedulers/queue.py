"""Requests that wait for an instance, in priority levels.

Whoever removes a request from the queue owns it. Removal is one C call on an ``OrderedDict``,
atomic under the interpreter's lock, so that the event loop (which adds, cancels and expires) and
the instance threads (which take) need no lock of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice
from typing import TypeAlias

from headrace.messages.ticket import Ticket

Lane: TypeAlias = "OrderedDict[Ticket, None]"


class RequestQueue:
    """First in, first out within a level; lower levels first; postponed requests after the others
    of their level. `add`, `postpone` on the event loop; everything else on any thread."""

    def __init__(self) -> None:
        #: Of each level that was asked for: those that wait, and those that were postponed. A model may have 2^64 - 1.
        self._levels: dict[int, tuple[Lane, Lane]] = {}
        #: All of them, in the order in which they are served. Replaced, never changed.
        self._lanes: tuple[Lane, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __contains__(self, ticket: Ticket) -> bool:
        return any(ticket in lane for lane in self._lanes)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self.head(len(self)))

    def size(self, level: int) -> int:
        """Requests waiting at ``level``, counted from 1."""
        return sum(map(len, self._levels.get(level, ())))

    def add(self, ticket: Ticket, level: int = 1) -> None:
        lanes = self._levels.get(level) or self._open(level)
        lanes[0][ticket] = None

    def postpone(self, ticket: Ticket, level: int) -> bool:
        """Move behind the unexpired requests of ``level``; False if it is no longer waiting."""
        if not self.remove(ticket):
            return False
        lanes = self._levels.get(level) or self._open(level)  # none, if the level was forgotten
        lanes[1][ticket] = None
        return True

    def remove(self, ticket: Ticket) -> bool:
        """Take ``ticket`` out; True makes the caller its owner."""
        for lane in self._lanes:  # noqa: SIM110 (a generator would double the cost of a request)
            if lane.pop(ticket, self) is None:
                return True
        return False

    def _open(self, level: int) -> tuple[Lane, Lane]:
        """Make the lanes of ``level``, and forget the levels where nothing waits: callers choose levels.

        Only `add` and `postpone`, on the same thread, put anything into a lane, so that an empty one stays so.
        """
        kept = {known: lanes for known, lanes in self._levels.items() if lanes[0] or lanes[1]}
        kept[level] = (OrderedDict(), OrderedDict())
        self._levels = dict(sorted(kept.items()))
        self._lanes = tuple(chain.from_iterable(self._levels.values()))
        return kept[level]

    def head(self, count: int) -> tuple[Ticket, ...]:
        """The next ``count`` requests, still waiting and still nobody's."""
        lanes = [lane for lane in self._lanes if lane]
        while True:
            try:
                # tuple() over C iterators: no bytecode runs in between, so hardly ever another thread.
                return tuple(islice(lanes[0] if len(lanes) == 1 else chain.from_iterable(lanes), count))
            except RuntimeError:  # a lane changed meanwhile, after all
                continue
