"""The way of answers from the threads of an instance to its scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.workers.crossing import Crossing


class Sink(Protocol):
    """Where answers are given out, on the event loop: a scheduler."""

    def progress(self, request: InferRequest, response: Answer) -> None: ...

    def deliver(self, requests: Sequence[InferRequest], answers: Sequence[Answer]) -> None: ...


class LoopOutlet:
    """An `headrace.workers.runner.Outlet` to ``sink``, which is told everything in the order sent.

    ``on_late`` is called on the loop for each last answer that was sent, before it is given out. When
    the loop has ended, the server has stopped without waiting for this instance: then nobody is left
    to be answered.
    """

    def __init__(
        self, sink: Sink, loop: asyncio.AbstractEventLoop, on_late: Callable[[InferRequest, Answer], None]
    ) -> None:
        self._sink, self._on_late = sink, on_late
        self._crossing = Crossing(loop)

    def send(self, request: InferRequest, answer: Answer, final: bool) -> None:
        request.respond_at_once = None  # what comes after this must not pass it
        self._crossing.send(self._end if final else self._sink.progress, request, answer)

    def deliver(self, requests: Sequence[InferRequest], answers: Sequence[Answer]) -> None:
        """Give out a batch of last answers, behind what was sent before; to threads that wait, at once."""
        for request, answer in zip(requests, answers, strict=True):
            at_once = request.respond_at_once  # which the loop may take away at any time
            if at_once is not None and isinstance(answer, InferResponse):
                at_once(answer)
        self._crossing.send(self._sink.deliver, requests, answers)

    def _end(self, request: InferRequest, answer: Answer) -> None:
        self._on_late(request, answer)
        self._sink.deliver((request,), (answer,))
