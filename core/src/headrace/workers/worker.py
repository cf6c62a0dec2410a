"""What runs an instance: a thread of the server, or a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headrace.messages.ticket import Ticket
from headrace.telemetry.observer import Observer
from headrace.workers.source import BatchSource


class Worker(Protocol):
    """One instance, from load to close. The loading thread calls `load`, `serve` and `join`."""

    @property
    def name(self) -> str:
        """The instance's."""

    @property
    def alive(self) -> bool:
        """Whether the instance can execute. False before `load`, and between a crash and the restart."""

    @property
    def reason(self) -> str:
        """Why it is not alive, or last was not: one line, then the last traceback. Empty if it always was."""

    @property
    def restarts(self) -> int:
        """How often the instance has been loaded again after it had died."""

    @property
    def executing(self) -> Sequence[Ticket]:
        """The batch that keeps the instance from taking another; empty while it is free."""

    @property
    def has_check(self) -> bool:
        """Whether the instance has something of its own to say in `check_ready`."""

    def load(self) -> None:
        """Wait until the instance is loaded and warmed up; raises what loading raised."""

    def serve(self, source: BatchSource, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer] = ()) -> None:
        """Begin to pull batches from ``source`` and to deliver on ``loop``."""

    def join(self) -> None:
        """Wait until the instance has closed. The source must have been closed before."""

    def check_ready(self) -> bool:
        """What the instance's ``is_ready`` says now; False while it is not `alive`.

        May block for as long as the instance's author likes, and raise what that author raises:
        call it on a thread of its own, one call at a time.
        """
