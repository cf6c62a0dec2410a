"""Rung 2: the instance answers request by request."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from headrace.backends.base import RequestInstance
from headrace.errors import BackendError
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.statistics import BatchTimes
from headrace.workers.output_schema import OutputSchema
from headrace.workers.runner import Runner, as_error


class RequestRunner(Runner):
    """Rung 2: the instance answers request by request."""

    def __init__(self, schema: OutputSchema, instance: RequestInstance) -> None:
        super().__init__(schema)
        self._execute = instance.execute_requests

    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        try:
            requests = [ticket.begin() for ticket in batch]
            given = self._execute(requests)
            if len(given) != len(batch):
                raise BackendError(
                    f"model '{self.schema.name}': the backend gave {len(given)} answers for {len(batch)} requests"
                )
            inferred = monotonic_ns()
            answers = [self.schema.signed(*pair) for pair in zip(requests, given, strict=True)]
        except BaseException as error:
            failure = as_error(error, self.schema)
            inferred = monotonic_ns()
            answers = [failure] * len(batch)
        for ticket in batch:
            ticket.end()
        return answers, BatchTimes(started, started, inferred, monotonic_ns())
