"""What runs an instance, and where its batches come from.

In `headrace.executors.instance_thread` the executor is a thread of the server. In `headrace.executors.process` the
instance has a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

from headrace.executors.threads import LoopWakeup, Wakeup
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import Observer

#: Gives out last answers.
Deliver: TypeAlias = Callable[[Sequence[Ticket], Sequence[Answer]], None]
#: What runs the batches of an instance.
RunsOn: TypeAlias = Literal["event_loop", "thread", "process"]


class BatchSource(Protocol):
    """Where batches come from and go back to: a `headrace.schedulers.instance_source.InstanceSource`.

    An executor on a thread of its own takes batches, one that lives on the event loop polls for them; a
    wakeup tells either when to look again. An executor with a thread may have the event loop run its batches.
    """

    #: How many batches the executor runs side by side; set when it begins to serve.
    calls_at_once: int

    @property
    def may_overlap(self) -> bool:
        """Whether the executor may take, one call at a time, while it runs what it has taken before."""

    def take(self, wakeup: Wakeup) -> list[Ticket] | None: ...

    def executed(self, took_ns: int) -> None:
        """An execution has taken so long. Any thread."""

    def run_on_loop(self, run: Callable[[list[Ticket]], int] | None) -> None: ...

    def poll(self, wakeup: LoopWakeup) -> list[Ticket] | None: ...

    def leave(self, wakeup: LoopWakeup) -> None: ...

    def progress(self, ticket: Ticket, response: Answer) -> None:
        """An answer that is not the last. Event loop only."""

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """Last answers. Event loop only."""


class Executor(Protocol):
    """One instance, from load to close. The loading thread calls `load`, `serve` and `join`."""

    @property
    def name(self) -> str:
        """The instance's."""

    @property
    def runs_on(self) -> RunsOn:
        """Where it executes now. Any thread."""

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
        """What the instance executes. It keeps it from taking a batch, unless it takes several; empty while free."""

    @property
    def held(self) -> Sequence[Ticket]:
        """Requests that the instance has, and whose last answers are to come after their execution has returned."""

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
