"""Executions run to their end, for callers who have no event loop."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.workers.runner import LATER, Runner


def complete(runner: Runner, batch: Sequence[Ticket]) -> Sequence[Answer]:
    """What each request was given at last, once all have ended. On the instance's thread.

    For a request that ended with None that is its latest response, None if there was none at all.
    """
    collector = _Collector()
    runner.connect(collector)
    given, _ = runner.run(batch)
    return [
        collector.last(ticket, collector.wait(ticket) if answer is LATER else answer)
        for ticket, answer in zip(batch, given, strict=True)
    ]


class _Collector:
    """A `headrace.workers.runner.AnswerSink` whose responses are read at once."""

    def __init__(self) -> None:
        self._responses: dict[Ticket, Answer] = {}
        self._ended: dict[Ticket, Answer] = {}
        self._arrivals: SimpleQueue[tuple[Ticket, Answer]] = SimpleQueue()

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        if final:
            self._arrivals.put((ticket, answer))
        else:
            self._responses[ticket] = answer
            ticket.read()

    def wait(self, ticket: Ticket) -> Answer:
        """The last answer to ``ticket``; blocks until it is there."""
        while ticket not in self._ended:
            arrived, answer = self._arrivals.get()
            self._ended[arrived] = answer
        return self._ended[ticket]

    def last(self, ticket: Ticket, answer: Answer) -> Answer:
        return self._responses.get(ticket) if answer is None else answer
