"""The base class of both strategies: the sequences of one instance, each in a slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from headrace import ModelConfig, Tensor, Ticket, Wait
from headrace_sequence.added_inputs import AddedInputs
from headrace_sequence.live import LiveSequence

Release: TypeAlias = Callable[[LiveSequence], None]


class Batcher(ABC):
    """The sequences in the slots of one instance, and its next batch. Event loop only.

    ``release`` is called with a sequence whose last request starts to run: its slot is free. It is None if requests are
    rescheduled, because the last run is then unknown. An instance that ``holds`` gets no more batches until all its
    requests are answered.
    """

    #: True if a sequence must wait for the answer of one request before the next may run.
    one_at_a_time = False

    def __init__(
        self, config: ModelConfig, size: int, inputs: AddedInputs, release: Release | None, holds: bool = False
    ) -> None:
        self.config, self.inputs = config, inputs
        self.slots: list[LiveSequence | None] = [None] * size
        #: Sequences with a request to run, in the order in which they became ready.
        self.ready: dict[LiveSequence, None] = {}
        self._release, self._holds = release or self._rest, holds
        if release is None:  # a running request may be rescheduled before the others of its sequence
            self.one_at_a_time = True
        self._running = 0
        #: True if its instance is to close when no sequence is bound to it.
        self.is_leaving = False

    @property
    def seated(self) -> int:
        """The number of sequences with a slot."""
        return len(self.slots) - self.slots.count(None)

    @property
    def is_empty(self) -> bool:
        """True if no sequence is bound to the instance, and none of their requests runs on it."""
        return not (self._running or self.seated)

    @abstractmethod
    def choose(self, now_ns: int) -> Sequence[Ticket] | Wait:
        """Return what the instance runs now. ``ready`` is not empty."""

    def next(self, now_ns: int) -> Sequence[Ticket] | Wait:
        if not self.ready or (self._holds and self._running):
            return ()
        return self.choose(now_ns)

    def seat(self, sequence: LiveSequence, slot: int, now_ns: int) -> None:
        """Give ``sequence`` the free ``slot``."""
        sequence.batcher, sequence.slot = self, slot
        self.slots[slot] = sequence
        if sequence.tickets:
            self.arrived(sequence, now_ns)

    def remove(self, sequence: LiveSequence) -> None:
        """Take the slot of ``sequence`` away."""
        self.slots[sequence.slot] = sequence.batcher = None
        self.ready.pop(sequence, None)

    def arrived(self, sequence: LiveSequence, now_ns: int) -> None:
        """Record that ``sequence`` has a waiting request again."""
        if not (self.one_at_a_time and sequence.running):
            sequence.ready_ns = now_ns
            self.ready[sequence] = None

    def take(self, sequence: LiveSequence) -> tuple[Ticket, Mapping[str, Tensor]]:
        """Return the next request of ``sequence``, which runs now, and its added inputs."""
        ticket = sequence.tickets.popleft()
        sequence.running += 1
        self._running += 1
        added = self.inputs.of(sequence, ticket.request)
        if ticket.request.sequence_end:
            self._release(sequence)
        elif self.one_at_a_time or not sequence.tickets:
            del self.ready[sequence]
        return ticket, added

    def requeue(self, sequence: LiveSequence, ticket: Ticket, now_ns: int) -> None:
        """Queue the rescheduled ``ticket`` before the others of ``sequence``."""
        sequence.running -= 1
        self._running -= 1
        sequence.tickets.appendleft(ticket)
        self.arrived(sequence, now_ns)

    def _rest(self, sequence: LiveSequence) -> None:
        """Keep the slot of ``sequence``."""
        if self.one_at_a_time or not sequence.tickets:
            del self.ready[sequence]

    def finished(self, sequence: LiveSequence, now_ns: int) -> None:
        """Note that a request of ``sequence`` that ran here is answered."""
        sequence.running -= 1
        self._running -= 1
        if self.one_at_a_time and sequence.tickets and sequence.batcher is self:
            self.arrived(sequence, now_ns)
