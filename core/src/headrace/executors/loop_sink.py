"""Brings answers from the thread that computed them to the event loop, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.executors.executor import BatchSource
from headrace.executors.threads import LoopMailbox
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.telemetry.log_limits import rate_limited_logger
from headrace.telemetry.log_output import clear_thread_model

log = rate_limited_logger(__name__)


class LoopSink:
    """A `headrace.executors.runner.AnswerSink` that passes everything to ``source`` in the order sent.

    ``on_late`` is called on the loop for each last answer that was sent, before it is delivered. If the loop has ended,
    the server has stopped without waiting for this instance, and the answers are dropped.
    """

    def __init__(
        self, source: BatchSource, loop: asyncio.AbstractEventLoop, on_late: Callable[[Ticket, Answer], None]
    ) -> None:
        self._source, self._on_late = source, on_late
        self._mailbox = LoopMailbox(loop)

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        ticket.respond_at_once = None  # later answers must not overtake this one
        self._mailbox.send(self._end if final else self._source.progress, ticket, answer)

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """Deliver a batch of last answers after everything sent before. Callers that wait on threads get theirs at
        once."""
        for ticket, answer in zip(tickets, answers, strict=True):
            at_once = ticket.respond_at_once  # read once: the loop may reset it at any time
            if at_once is not None and isinstance(answer, InferResponse):
                at_once(answer)
        self._mailbox.send(self._source.deliver, tickets, answers)

    def deliver_now(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """`deliver` on the event loop, which has run the batch: everything is delivered when this returns."""
        clear_thread_model()
        self._mailbox.flush()
        try:
            self._source.deliver(tickets, answers)
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.exception("a batch could not be delivered")

    def _end(self, ticket: Ticket, answer: Answer) -> None:
        self._on_late(ticket, answer)
        self._source.deliver((ticket,), (answer,))
