"""Requests that wait for an instance, in priority levels.

Whoever removes a request from the queue owns it. Removal is one C call on an ``OrderedDict``,
atomic under the interpreter's lock, so that the event loop (which adds, cancels and expires) and
the instance threads (which take) need no lock of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice

from penstock.messages.request import InferRequest


class RequestQueue:
    """First in, first out within a level; lower levels first; postponed requests after the others
    of their level. `add`, `postpone` on the event loop; everything else on any thread."""

    def __init__(self, levels: int = 1) -> None:
        self._lanes: tuple[OrderedDict[InferRequest, None], ...] = tuple(OrderedDict() for _ in range(2 * levels))

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __contains__(self, request: InferRequest) -> bool:
        return any(request in lane for lane in self._lanes)

    def size(self, level: int) -> int:
        """Requests waiting at ``level``, counted from 1."""
        return len(self._lanes[2 * level - 2]) + len(self._lanes[2 * level - 1])

    def add(self, request: InferRequest, level: int = 1) -> None:
        self._lanes[2 * level - 2][request] = None

    def postpone(self, request: InferRequest, level: int) -> bool:
        """Move behind the unexpired requests of ``level``; False if it is no longer waiting."""
        if not self.remove(request):
            return False
        self._lanes[2 * level - 1][request] = None
        return True

    def remove(self, request: InferRequest) -> bool:
        """Take ``request`` out; True makes the caller its owner."""
        for lane in self._lanes:  # noqa: SIM110 (a generator would double the cost of a request)
            if lane.pop(request, self) is None:
                return True
        return False

    def head(self, count: int) -> tuple[InferRequest, ...]:
        """The next ``count`` requests, still waiting and still nobody's."""
        lanes = [lane for lane in self._lanes if lane]
        while True:
            try:
                # tuple() over C iterators: no bytecode runs in between, so hardly ever another thread.
                return tuple(islice(lanes[0] if len(lanes) == 1 else chain.from_iterable(lanes), count))
            except RuntimeError:  # a lane changed meanwhile, after all
                continue
