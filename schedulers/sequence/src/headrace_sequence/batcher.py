"""What both strategies have in common: the sequences of one instance, each in a slot of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from headrace import ModelConfig, Tensor, Ticket, Wait
from headrace_sequence.added_inputs import AddedInputs
from headrace_sequence.live import LiveSequence

Release: TypeAlias = Callable[[LiveSequence], None]


class Batcher(ABC):
    """The sequences that have a slot of one instance, and what it runs next. Event loop only.

    ``release`` is called with a sequence whose last request begins to run: another may have its slot. None, if requests
    come back: then nobody knows which run is the last. An instance that ``holds`` gets nothing more until all that it
    has is answered.
    """

    #: Whether a sequence has to wait for the answer of one request before the next may run.
    one_at_a_time = False

    def __init__(
        self, config: ModelConfig, size: int, inputs: AddedInputs, release: Release | None, holds: bool = False
    ) -> None:
        self.config, self.inputs = config, inputs
        self.slots: list[LiveSequence | None] = [None] * size
        #: Those that have a request to run, in the order in which they came to have it.
        self.ready: dict[LiveSequence, None] = {}
        self._release, self._holds = release or self._rest, holds
        if release is None:  # who runs may come back, and goes before the others of its sequence
            self.one_at_a_time = True
        self._running = 0
        #: Whether its instance is to go once nothing is bound to it.
        self.is_leaving = False

    @property
    def seated(self) -> int:
        """How many sequences have a slot."""
        return len(self.slots) - self.slots.count(None)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is bound to the instance, and no request of any runs on it."""
        return not (self._running or self.seated)

    @abstractmethod
    def choose(self, now_ns: int) -> Sequence[Ticket] | Wait:
        """What the instance runs now. ``ready`` is not empty."""

    def next(self, now_ns: int) -> Sequence[Ticket] | Wait:
        if not self.ready or (self._holds and self._running):
            return ()
        return self.choose(now_ns)

    def seat(self, sequence: LiveSequence, slot: int, now_ns: int) -> None:
        """Give ``sequence`` the slot, which is free."""
        sequence.batcher, sequence.slot = self, slot
        self.slots[slot] = sequence
        if sequence.tickets:
            self.arrived(sequence, now_ns)

    def leave(self, sequence: LiveSequence) -> None:
        """Take its slot from ``sequence``."""
        self.slots[sequence.slot] = sequence.batcher = None
        self.ready.pop(sequence, None)

    def arrived(self, sequence: LiveSequence, now_ns: int) -> None:
        """``sequence`` had no request that waits, and has one."""
        if not (self.one_at_a_time and sequence.running):
            sequence.ready_ns = now_ns
            self.ready[sequence] = None

    def take(self, sequence: LiveSequence) -> tuple[Ticket, Mapping[str, Tensor]]:
        """The next request of ``sequence``, which runs now, with its further inputs."""
        ticket = sequence.tickets.popleft()
        sequence.running += 1
        self._running += 1
        added = self.inputs.of(sequence, ticket.request)
        if ticket.request.sequence_end:
            self._release(sequence)
        elif self.one_at_a_time or not sequence.tickets:
            del self.ready[sequence]
        return ticket, added

    def take_back(self, sequence: LiveSequence, ticket: Ticket, now_ns: int) -> None:
        """``ticket`` of ``sequence`` has run here, and is to run again, before the others of its sequence."""
        sequence.running -= 1
        self._running -= 1
        sequence.tickets.appendleft(ticket)
        self.arrived(sequence, now_ns)

    def _rest(self, sequence: LiveSequence) -> None:
        """``sequence`` keeps its slot."""
        if self.one_at_a_time or not sequence.tickets:
            del self.ready[sequence]

    def finished(self, sequence: LiveSequence, now_ns: int) -> None:
        """A request of ``sequence`` is answered that ran here."""
        sequence.running -= 1
        self._running -= 1
        if self.one_at_a_time and sequence.tickets and sequence.batcher is self:
            self.arrived(sequence, now_ns)
