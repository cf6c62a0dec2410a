"""Rung 3: the instance gives any number of responses per request."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import monotonic_ns

from headrace.backends.base import StreamInstance
from headrace.errors import Cancelled, HeadraceError
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.telemetry.statistics import BatchTimes
from headrace.workers.credit_window import CreditWindow
from headrace.workers.output_schema import OutputSchema
from headrace.workers.runner import Runner, as_error


class StreamRunner(Runner):
    """Rung 3: one request after the other, each giving responses until its iterator ends."""

    def __init__(self, schema: OutputSchema, instance: StreamInstance) -> None:
        super().__init__(schema)
        self._stream = instance.stream

    def run(self, batch: Sequence[InferRequest]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        # Those at the end of the batch may leave while those before them are answered.
        answers = [_gone(request) if request.cancelled else self._exhaust(request) for request in batch]
        ended = monotonic_ns()
        return answers, BatchTimes(started, started, ended, ended)

    def _exhaust(self, request: InferRequest) -> HeadraceError | None:
        window = CreditWindow.over(request)
        try:
            with contextlib.closing(self._stream(request)) as responses:  # type: ignore[type-var]
                for response in responses:
                    window.acquire()
                    if request.cancelled:
                        return _gone(request)
                    self.sink.send(request, self.schema.sign(request, response), False)
        except BaseException as error:
            return as_error(error, self.schema)
        return None


def _gone(request: InferRequest) -> Cancelled:
    return Cancelled(f"{request.log_id}request was cancelled")
