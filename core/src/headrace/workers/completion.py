"""Executions run to their end, for callers who have no event loop."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.workers.runner import LATER, Runner


def complete(runner: Runner, batch: Sequence[InferRequest]) -> Sequence[Answer]:
    """What each request was given at last, once all have ended. On the instance's thread.

    For a request that ended with None that is its latest response, None if there was none at all.
    """
    collector = _Collector()
    runner.connect(collector)
    given, _ = runner.run(batch)
    return [
        collector.last(request, collector.wait(request) if answer is LATER else answer)
        for request, answer in zip(batch, given, strict=True)
    ]


class _Collector:
    """A `headrace.workers.runner.AnswerSink` whose responses are read at once."""

    def __init__(self) -> None:
        self._responses: dict[InferRequest, Answer] = {}
        self._ended: dict[InferRequest, Answer] = {}
        self._arrivals: SimpleQueue[tuple[InferRequest, Answer]] = SimpleQueue()

    def send(self, request: InferRequest, answer: Answer, final: bool) -> None:
        if final:
            self._arrivals.put((request, answer))
        else:
            self._responses[request] = answer
            request.read()

    def wait(self, request: InferRequest) -> Answer:
        """The last answer to ``request``; blocks until it is there."""
        while request not in self._ended:
            arrived, answer = self._arrivals.get()
            self._ended[arrived] = answer
        return self._ended[request]

    def last(self, request: InferRequest, answer: Answer) -> Answer:
        return self._responses.get(request) if answer is None else answer
