"""One execution: stack the requests of a batch, run the instance, split the answers.

`runner_for` chooses, once at load, how an instance is driven. Everything here runs on the
instance's thread.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import TypeAlias

from penstock.backends.base import AnyInstance, Instance, RequestInstance, StreamInstance
from penstock.errors import BackendError, Cancelled, PenstockError
from penstock.messages.request import InferRequest
from penstock.messages.response import InferResponse
from penstock.messages.tensor import BytesTensor, Tensor, as_tensor, concatenate, data_type
from penstock.telemetry.statistics import BatchTimes
from penstock.workers.contract import Contract

log = logging.getLogger(__name__)

#: A final answer; None ends a stream whose responses have already gone out.
Answer: TypeAlias = InferResponse | PenstockError | None

#: Sends a response that is not the last of its request; callable on the instance's thread.
Progress: TypeAlias = Callable[[InferRequest, InferResponse], None]


class Runner(ABC):
    """Drives one instance. ``contract`` is what its model promises to clients."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def connect(self, progress: Progress) -> None:
        """Where responses go that are not the last of their request; called before `run`."""

    @abstractmethod
    def run(self, batch: Sequence[InferRequest]) -> tuple[Sequence[Answer], BatchTimes]:
        """One final answer per request, in order. Never raises because of the instance."""

    def respond(self, request: InferRequest, outputs: Mapping[str, Tensor]) -> InferResponse:
        """An answer of this model to ``request``."""
        return InferResponse(outputs, {}, self.contract.name, self.contract.version, request.id)

    def sign(self, request: InferRequest, answer: InferResponse) -> InferResponse:
        """``answer`` as this model's, with the outputs requested; raises `BackendError`."""
        outputs: dict[str, Tensor] = {}
        for name, value in answer.outputs.items():
            tensor, spec = as_tensor(value), self.contract.outputs.get(name)
            if spec is None or data_type(tensor) is not spec.datatype:
                raise BackendError(f"model '{self.contract.name}': output '{name}' is not what the config declares")
            if not request.outputs or name in request.outputs:
                outputs[name] = tensor
        return InferResponse(outputs, answer.parameters, self.contract.name, self.contract.version, request.id)


class RowsRunner(Runner):
    """Rung 1: rows in, rows out."""

    def __init__(self, contract: Contract, instance: Instance) -> None:
        super().__init__(contract)
        self._execute = instance.execute

    def run(self, batch: Sequence[InferRequest]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        stacked = inferred = started
        try:
            inputs = _stack(batch)
            stacked = monotonic_ns()
            results = self._execute(inputs)
            inferred = monotonic_ns()
            answers: Sequence[Answer] = self._split(batch, results)
        except Exception as error:
            if len(batch) > 1:
                # Rows are independent, so the others can be answered without the culprit.
                answers = [self.run([request])[0][0] for request in batch]
            else:
                answers = [as_error(error, self.contract)]
            stacked, inferred = max(stacked, started), max(inferred, stacked)
        return answers, BatchTimes(started, stacked, inferred, monotonic_ns())

    def _split(self, batch: Sequence[InferRequest], results: Mapping[str, object]) -> list[Answer]:
        outputs = self._checked(results, sum(request.rows for request in batch), _wanted(batch))
        if len(batch) == 1:
            request = batch[0]
            names = request.outputs or outputs
            return [self.respond(request, {name: outputs[name] for name in names})]
        answers: list[Answer] = []
        begin = 0
        for request in batch:
            end = begin + request.rows
            names = request.outputs or outputs
            answers.append(self.respond(request, {name: _rows(outputs[name], begin, end) for name in names}))
            begin = end
        return answers

    def _checked(self, results: Mapping[str, object], rows: int, wanted: set[str] | None) -> dict[str, Tensor]:
        """The outputs in config order and client shape, or `BackendError` naming the one at fault."""
        outputs: dict[str, Tensor] = {}
        for name, spec in self.contract.outputs.items():
            if name in results:
                outputs[name] = self.contract.accept(spec, as_tensor(results[name]), rows)  # type: ignore[arg-type]
            elif wanted is None or name in wanted:
                raise BackendError(
                    f"model '{self.contract.name}': the backend gave no output '{name}', only {sorted(results)}"
                )
        return outputs


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
            answers: list[Answer] = [self._signed(*pair) for pair in zip(batch, given, strict=True)]
        except Exception as error:
            failure = as_error(error, self.contract)
            inferred = monotonic_ns()
            answers = [failure] * len(batch)
        return answers, BatchTimes(started, started, inferred, monotonic_ns())

    def _signed(self, request: InferRequest, answer: InferResponse | PenstockError) -> Answer:
        if isinstance(answer, PenstockError):
            return answer
        try:
            return self.sign(request, answer)
        except PenstockError as error:
            return error


class StreamRunner(Runner):
    """Rung 3: one request after the other, each giving responses until its iterator ends."""

    def __init__(self, contract: Contract, instance: StreamInstance) -> None:
        super().__init__(contract)
        self._stream = instance.stream
        self._progress: Progress = _nobody_listens

    def connect(self, progress: Progress) -> None:
        self._progress = progress

    def run(self, batch: Sequence[InferRequest]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        answers = [self._exhaust(request) for request in batch]
        ended = monotonic_ns()
        return answers, BatchTimes(started, started, ended, ended)

    def _exhaust(self, request: InferRequest) -> PenstockError | None:
        try:
            with contextlib.closing(self._stream(request)) as responses:  # type: ignore[type-var]
                for response in responses:
                    if request.cancelled:
                        return Cancelled(f"{request.log_id}request was cancelled")
                    self._progress(request, self.sign(request, response))
        except Exception as error:
            return as_error(error, self.contract)
        return None


def runner_for(instance: AnyInstance, contract: Contract) -> Runner:
    """The runner for the rung that ``instance`` stands on."""
    if isinstance(instance, Instance):
        return RowsRunner(contract, instance)
    if isinstance(instance, RequestInstance):
        return RequestRunner(contract, instance)
    if isinstance(instance, StreamInstance):
        return StreamRunner(contract, instance)
    raise BackendError(
        f"model '{contract.name}': {type(instance).__name__} is no Instance, RequestInstance or StreamInstance"
    )


def run_batch(runner: Runner, batch: Sequence[InferRequest]) -> tuple[Sequence[Answer], BatchTimes]:
    """Run those of ``batch`` whose callers are still there; the others get `Cancelled`."""
    if not any(request.cancelled for request in batch):
        return runner.run(batch)
    alive = [request for request in batch if not request.cancelled]
    now = monotonic_ns()
    answers, times = runner.run(alive) if alive else ((), BatchTimes(now, now, now, now))
    answered = iter(answers)
    return [
        Cancelled(f"{request.log_id}request was cancelled") if request.cancelled else next(answered)
        for request in batch
    ], times


def as_error(error: Exception, contract: Contract) -> PenstockError:
    """``error`` as the caller will see it; an unexpected one is logged with its traceback."""
    if isinstance(error, PenstockError):
        return error
    log.error("model '%s' version %s failed to execute", contract.name, contract.version, exc_info=error)
    failure = BackendError(f"model '{contract.name}' failed to execute: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _stack(batch: Sequence[InferRequest]) -> Mapping[str, Tensor]:
    """The inputs of all requests, row under row; a single request's own inputs, uncopied."""
    first = batch[0].inputs
    if len(batch) == 1:
        return first  # type: ignore[return-value]  # Signature.check has refused all Undecoded
    return {name: concatenate([request.inputs[name] for request in batch]) for name in first}  # type: ignore[misc]


def _wanted(batch: Sequence[InferRequest]) -> set[str] | None:
    """The outputs that somebody asked for; None for all."""
    if not all(request.outputs for request in batch):
        return None
    return {name for request in batch for name in request.outputs}


def _rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    return tensor.rows(begin, end) if isinstance(tensor, BytesTensor) else tensor[begin:end]


def _nobody_listens(request: InferRequest, response: InferResponse) -> None:
    """Warm-up runs before anybody is connected."""
