"""How answers get from the thread that has made them to the event loop, in the order in which they were made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.executors.executor import BatchSource
from headrace.executors.threads import LoopMailbox
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.telemetry.log_output import speak_for_nobody
from headrace.telemetry.pacing import paced

log = paced(__name__)


class LoopSink:
    """A `headrace.executors.runner.AnswerSink` to ``source``, which is told everything in the order sent.

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
        self._give_at_once(tickets, answers)
        self._mailbox.send(self._source.deliver, tickets, answers)

    @staticmethod
    def _give_at_once(tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        for ticket, answer in zip(tickets, answers, strict=True):
            at_once = ticket.respond_at_once  # which the loop may take away at any time
            if at_once is not None and isinstance(answer, InferResponse):
                at_once(answer)

    def deliver_now(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """`deliver`, on the event loop, which has run the batch, before this returns."""
        speak_for_nobody()
        self._mailbox.flush()
        self._give_at_once(tickets, answers)
        try:
            self._source.deliver(tickets, answers)
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.exception("a batch could not be delivered")

    def _end(self, ticket: Ticket, answer: Answer) -> None:
        self._on_late(ticket, answer)
        self._source.deliver((ticket,), (answer,))
