"""The executor of an instance, and the source of its batches.

In `headrace.executors.instance_thread` the executor is a thread of the server. In `headrace_processes` the
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

#: Delivers last answers.
Deliver: TypeAlias = Callable[[Sequence[Ticket], Sequence[Answer]], None]
#: Where the batches of an instance run.
RunsOn: TypeAlias = Literal["event_loop", "thread", "process"]


class BatchSource(Protocol):
    """Gives out batches and takes back answers: a `headrace.schedulers.instance_source.InstanceSource`.

    An executor with a thread takes batches. An executor on the event loop polls for them. After an empty poll, it waits
    for its wakeup. An executor with a thread may let the event loop run its batches.
    """

    #: The number of batches that the executor runs at the same time. Set when it begins to serve.
    calls_at_once: int

    @property
    def may_overlap(self) -> bool:
        """True if the executor may take another batch, one call at a time, while it runs one."""

    def take(self, wakeup: Wakeup) -> list[Ticket] | None: ...

    def executed(self, took_ns: int) -> None:
        """Record the duration of an execution. Any thread."""

    def run_on_loop(self, run: Callable[[list[Ticket]], int] | None) -> None: ...

    def poll(self, wakeup: LoopWakeup) -> list[Ticket] | None: ...

    def stop_polling(self, wakeup: LoopWakeup) -> None: ...

    def progress(self, ticket: Ticket, response: Answer) -> None:
        """Deliver an answer that is not the last. Event loop only."""

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """Deliver last answers. Event loop only."""


class Executor(Protocol):
    """Runs one instance, from load to close. The loading thread calls `load`, `serve` and `join`.

    One with a process of its own may have a method ``memory_bytes``: the memory of that process, in bytes; 0 between a
    crash and the restart. It is called on any thread and may block for some ms. One in the server has an attribute
    ``takes_device_tensors`` if its instance can.
    """

    @property
    def name(self) -> str:
        """The name of the instance."""

    @property
    def runs_on(self) -> RunsOn:
        """The place where it executes now. Any thread."""

    @property
    def alive(self) -> bool:
        """True if the instance can execute. False before `load`, and between a crash and the restart."""

    @property
    def reason(self) -> str:
        """The reason of the last death: one line, then the last traceback. Empty if it never died."""

    @property
    def restarts(self) -> int:
        """The number of times that the instance was loaded again after it had died."""

    @property
    def executing(self) -> Sequence[Ticket]:
        """The requests that the instance executes; empty while it is idle.

        While there are any, it takes no other batch, unless it runs several at once.
        """

    @property
    def unanswered(self) -> Sequence[Ticket]:
        """The requests whose execution has returned and that have no last answer yet."""

    @property
    def has_check(self) -> bool:
        """True if the instance has an ``is_ready`` of its own, which `check_ready` calls."""

    def load(self) -> None:
        """Wait until the instance is loaded and warmed up. Raises what loading raised."""

    def serve(self, source: BatchSource, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer] = ()) -> None:
        """Start to take batches from ``source`` and to deliver on ``loop``."""

    def join(self) -> None:
        """Wait until the instance has closed. Close the source first."""

    def check_ready(self) -> bool:
        """Return the result of the instance's ``is_ready``; False while it is not `alive`.

        It runs code of the model's author, so it may block for any time and raise anything. Call it on a thread of its
        own, one call at a time.
        """
