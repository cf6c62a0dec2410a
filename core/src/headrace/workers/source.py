"""Where the batches of an instance come from."""

from __future__ import annotations

from typing import Protocol

from headrace.messages.request import InferRequest
from headrace.workers.bell import Bell, LoopBell
from headrace.workers.outlet import Sink


class BatchSource(Sink, Protocol):
    """Where batches come from and go back to: a `headrace.schedulers.base.Scheduler`.

    A worker on a thread of its own takes batches, one that lives on the event loop polls for them; a
    bell tells either when to look again.
    """

    def take(self, bell: Bell) -> list[InferRequest] | None: ...

    def poll(self, bell: LoopBell) -> list[InferRequest] | None: ...

    def leave(self, bell: LoopBell) -> None: ...
