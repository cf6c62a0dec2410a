"""A live sequence: started and not ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from headrace import Tensor, Ticket, Timer


class SlotOwner(Protocol):
    """The owner of a sequence's slot: `headrace_sequence.batcher.Batcher`."""

    is_leaving: bool

    def seat(self, sequence: LiveSequence, slot: int, now_ns: int) -> None: ...

    def remove(self, sequence: LiveSequence) -> None: ...

    def arrived(self, sequence: LiveSequence, now_ns: int) -> None: ...


class LiveSequence:
    """A live sequence. ``tickets`` are its waiting requests, in order; ``running`` counts those of its instance.

    ``batcher`` is None without a slot: in the backlog, and after its last request has started.
    """

    __slots__ = (
        "batcher", "id", "inputs", "is_private", "ready_ns", "running", "slot", "states", "tickets", "timer",
        "touched_ns",
    )  # fmt: skip

    def __init__(self, id: int | str, is_private: bool = False) -> None:
        self.id = id
        #: True if the server generated the id: no further request may use it.
        self.is_private = is_private
        self.tickets: deque[Ticket] = deque()
        self.running = 0
        self.batcher: SlotOwner | None = None
        self.slot = 0
        #: The time at which its first waiting request could have run.
        self.ready_ns = 0
        #: The time of the last event, and the timer that checks whether it is idle.
        self.touched_ns = 0
        self.timer: Timer | None = None
        #: The control inputs of its requests by flags, created at first use.
        self.inputs: list[Mapping[str, Tensor] | None] = [None] * 4
        #: The states of the model, by input name.
        self.states: Mapping[str, Tensor] = {}
