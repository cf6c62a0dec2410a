"""Where the batches of an instance come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.workers.wakeup import LoopWakeup, Wakeup


class BatchSource(Protocol):
    """Where batches come from and go back to: a `headrace.schedulers.base.Scheduler`.

    A worker on a thread of its own takes batches, one that lives on the event loop polls for them; a
    wakeup tells either when to look again.
    """

    def take(self, wakeup: Wakeup) -> list[Ticket] | None: ...

    def poll(self, wakeup: LoopWakeup) -> list[Ticket] | None: ...

    def leave(self, wakeup: LoopWakeup) -> None: ...

    def progress(self, ticket: Ticket, response: Answer) -> None:
        """An answer that is not the last. Event loop only."""

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """Last answers. Event loop only."""
