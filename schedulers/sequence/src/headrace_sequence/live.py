"""A sequence that has begun and has not ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from headrace import Tensor, Ticket, Timer


class SlotOwner(Protocol):
    """What a sequence knows of who has its slot: `headrace_sequence.batcher.Batcher`."""

    is_leaving: bool

    def seat(self, sequence: LiveSequence, slot: int, now_ns: int) -> None: ...

    def leave(self, sequence: LiveSequence) -> None: ...

    def arrived(self, sequence: LiveSequence, now_ns: int) -> None: ...


class LiveSequence:
    """``tickets`` are its requests that wait, in order; ``running`` counts those that its instance has.

    ``batcher`` is None while it has no slot: in the backlog, and once its last request has begun to run.
    """

    __slots__ = (
        "batcher", "id", "inputs", "is_private", "ready_ns", "running", "slot", "states", "tickets", "timer",
        "touched_ns",
    )  # fmt: skip

    def __init__(self, id: int | str, is_private: bool = False) -> None:
        self.id = id
        #: True if the server made the id: no further request may name it.
        self.is_private = is_private
        self.tickets: deque[Ticket] = deque()
        self.running = 0
        self.batcher: SlotOwner | None = None
        self.slot = 0
        #: When its first request that waits could have run.
        self.ready_ns = 0
        #: When something happened to it last, and what looks whether that is too long ago.
        self.touched_ns = 0
        self.timer: Timer | None = None
        #: What the model is told of its requests, by their flags, made when first needed.
        self.inputs: list[Mapping[str, Tensor] | None] = [None] * 4
        #: The states of the model, by the names of its inputs.
        self.states: Mapping[str, Tensor] = {}
