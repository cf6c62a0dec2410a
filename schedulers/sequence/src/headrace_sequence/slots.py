"""The free slots, and the sequences that wait for one."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from headrace_sequence.batcher import Batcher
from headrace_sequence.live import LiveSequence, SlotOwner


class SlotTable:
    """The slots of all instances. The lowest free slot is given first, so that sequences spread and batches stay short.

    Of equal slots, the one that was free longest is first.
    """

    def __init__(self, batchers: Sequence[Batcher]) -> None:
        self._turns = count()
        self._free: list[tuple[int, int, SlotOwner]] = [
            (slot, next(self._turns), batcher) for batcher in batchers for slot in range(len(batcher.slots))
        ]
        heapify(self._free)
        #: The sequences that wait for a slot, in order of arrival.
        self.backlog: dict[LiveSequence, None] = {}

    def add(self, batcher: Batcher, now_ns: int) -> None:
        """Add the slots of a new instance, and assign them to waiting sequences."""
        for slot in range(len(batcher.slots)):
            heappush(self._free, (slot, next(self._turns), batcher))
        while self.backlog and self._free:
            first = next(iter(self.backlog))
            del self.backlog[first]
            self.admit(first, now_ns)

    def remove(self, batcher: Batcher) -> None:
        """Remove the slots of an instance that is being removed."""
        batcher.is_leaving = True
        self._free = [free for free in self._free if free[2] is not batcher]
        heapify(self._free)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def admit(self, sequence: LiveSequence, now_ns: int) -> None:
        """Give ``sequence`` a slot, or a place in the backlog."""
        if self._free:
            slot, _, batcher = heappop(self._free)
            batcher.seat(sequence, slot, now_ns)
        else:
            self.backlog[sequence] = None

    def release(self, sequence: LiveSequence, now_ns: int) -> None:
        """Free the slot of ``sequence``, and assign it to the first of the backlog."""
        batcher = sequence.batcher
        if batcher is None:
            self.backlog.pop(sequence, None)
            return
        slot = sequence.slot
        batcher.remove(sequence)
        if batcher.is_leaving:
            return
        if self.backlog:
            first = next(iter(self.backlog))
            del self.backlog[first]
            batcher.seat(first, slot, now_ns)
        else:
            heappush(self._free, (slot, next(self._turns), batcher))
