"""Rung 2: the instance answers request by request."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from penstock.backends.base import RequestInstance
from penstock.errors import BackendError
from penstock.messages.request import InferRequest
from penstock.messages.response import Answer
from penstock.telemetry.statistics import BatchTimes
from penstock.workers.contract import Contract
from penstock.workers.runner import Runner, as_error


class RequestRunner(Runner):
    """Rung 2: the instance answers request by request."""

    def __init__(self, contract: Contract, instance: RequestInstance) -> None:
        super().__init__(contract)
        self._execute = instance.execute_requests

    def run(self, batch: Sequence[InferRequest]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        try:
            given = self._execute(batch)
            if len(given) != len(batch):
                raise BackendError(
                    f"model '{self.contract.name}': the backend gave {len(given)} answers for {len(batch)} requests"
                )
            inferred = monotonic_ns()
            answers = [self.contract.signed(*pair) for pair in zip(batch, given, strict=True)]
        except BaseException as error:
            failure = as_error(error, self.contract)
            inferred = monotonic_ns()
            answers = [failure] * len(batch)
        return answers, BatchTimes(started, started, inferred, monotonic_ns())
