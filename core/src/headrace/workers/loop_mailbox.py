"""The way from the threads of instances to the event loop, and of answers from them to their scheduler."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Sequence

from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.telemetry.pacing import paced
from headrace.workers.worker import BatchSource

log = paced(__name__)


class LoopMailbox:
    """Calls on ``loop`` what it is given, in order. However much comes before the loop looks, it wakes once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_waking = False

    def send(self, call: Callable[..., object], *arguments: object) -> bool:
        """Call soon, never before this returns. Any thread, the loop's too. False if the loop has ended."""
        self._waiting.append((call, arguments))
        if self._is_waking:
            return not self.loop.is_closed()
        self._is_waking = True
        loop = self.loop
        try:
            # On the loop's own thread it is awake, and need not be written to.
            (loop.call_soon if _get_running_loop() is loop else loop.call_soon_threadsafe)(self._call_waiting)
        except RuntimeError:
            if not loop.is_closed():
                raise
            return False
        return True

    def _call_waiting(self) -> None:
        self._is_waking = False  # first: whoever sends from here on wakes the loop again
        for _ in range(len(self._waiting)):  # what comes meanwhile has to let others through
            call, arguments = self._waiting.popleft()
            try:
                call(*arguments)
            except KeyboardInterrupt:
                self.send(_nothing)  # wakes the loop for those behind it, if it goes on
                raise
            except BaseException:
                log.exception("a call from a model's thread failed")


def _nothing() -> None:
    """What is sent for the sake of the wake-up."""


class LoopSink:
    """A `headrace.workers.runner.AnswerSink` to ``source``, which is told everything in the order sent.

    ``on_late`` is called on the loop for each last answer that was sent, before it is given out. When
    the loop has ended, the server has stopped without waiting for this instance: then nobody is left
    to be answered.
    """

    def __init__(
        self, source: BatchSource, loop: asyncio.AbstractEventLoop, on_late: Callable[[Ticket, Answer], None]
    ) -> None:
        self._source, self._on_late = source, on_late
        self._mailbox = LoopMailbox(loop)

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        ticket.respond_at_once = None  # what comes after this must not pass it
        self._mailbox.send(self._end if final else self._source.progress, ticket, answer)

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """Give out a batch of last answers, behind what was sent before; to threads that wait, at once."""
        for ticket, answer in zip(tickets, answers, strict=True):
            at_once = ticket.respond_at_once  # which the loop may take away at any time
            if at_once is not None and isinstance(answer, InferResponse):
                at_once(answer)
        self._mailbox.send(self._source.deliver, tickets, answers)

    def _end(self, ticket: Ticket, answer: Answer) -> None:
        self._on_late(ticket, answer)
        self._source.deliver((ticket,), (answer,))
