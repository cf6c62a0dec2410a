"""Rung 3: the instance gives any number of responses per request."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import monotonic_ns

from headrace.backends.base import StreamInstance
from headrace.errors import Cancelled, HeadraceError
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.statistics import BatchTimes
from headrace.workers.credit_window import CreditWindow
from headrace.workers.output_schema import OutputSchema
from headrace.workers.runner import Runner, as_error


class StreamRunner(Runner):
    """Rung 3: one request after the other, each giving responses until its iterator ends."""

    def __init__(self, schema: OutputSchema, instance: StreamInstance) -> None:
        super().__init__(schema)
        self._stream = instance.stream

    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        # Those at the end of the batch may leave while those before them are answered.
        answers = [_gone(ticket) if ticket.cancelled else self._exhaust(ticket) for ticket in batch]
        ended = monotonic_ns()
        return answers, BatchTimes(started, started, ended, ended)

    def _exhaust(self, ticket: Ticket) -> HeadraceError | None:
        window, request = CreditWindow.over(ticket), ticket.begin()
        try:
            with contextlib.closing(self._stream(request)) as responses:  # type: ignore[type-var]
                for response in responses:
                    window.acquire()
                    if ticket.cancelled:
                        return _gone(ticket)
                    self.sink.send(ticket, self.schema.sign(request, response), False)
        except BaseException as error:
            return as_error(error, self.schema)
        finally:
            ticket.end()
        return None


def _gone(ticket: Ticket) -> Cancelled:
    return Cancelled(f"{ticket.request.log_id}request was cancelled")
