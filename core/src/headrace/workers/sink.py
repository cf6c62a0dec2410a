"""The way of answers from the threads of an instance to its scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.workers.loop_mailbox import LoopMailbox
from headrace.workers.source import BatchSource


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
