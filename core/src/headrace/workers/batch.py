"""One execution: who drives the instance, and who of the batch is still there to be answered.

The runners of rungs 1 to 3 are here: rows in and rows out, request by request, and any number of responses per
request; `headrace.workers.deferred` has the fourth. Everything here runs on the instance's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from time import monotonic_ns

from headrace.backends.base import AnyInstance, DeferredInstance, Instance, RequestInstance, StreamInstance
from headrace.errors import BackendError, Cancelled, HeadraceError
from headrace.messages.response import Answer
from headrace.messages.tensor import BytesTensor, Tensor, as_tensor, concatenate
from headrace.messages.ticket import Ticket
from headrace.telemetry.statistics import BatchTimes
from headrace.workers.credit_window import CreditWindow
from headrace.workers.deferred import DeferredRunner
from headrace.workers.output_schema import OutputSchema
from headrace.workers.runner import Given, Runner, as_error


class RowsRunner(Runner):
    """Rung 1: rows in, rows out."""

    def __init__(self, schema: OutputSchema, instance: Instance) -> None:
        super().__init__(schema)
        self._execute = instance.execute
        self.parameters = instance.response_parameters

    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        stacked = inferred = started
        try:
            inputs = _stack(batch)
            stacked = monotonic_ns()
            results = self._execute(inputs)
            inferred = monotonic_ns()
            answers: Sequence[Answer] = self._split(batch, results)
        except BaseException as error:
            if len(batch) > 1 and not all(ticket.pinned for ticket in batch):
                # Rows are independent, so the others can be answered without the culprit. Padding is nobody's.
                answers = [None if ticket.pinned else self._run_alone(ticket) for ticket in batch]
            else:
                answers = [as_error(error, self.schema)] * len(batch)
            stacked, inferred = max(stacked, started), max(inferred, stacked)
        return answers, BatchTimes(started, stacked, inferred, monotonic_ns())

    def _run_alone(self, ticket: Ticket) -> Answer:
        if ticket.cancelled:  # meanwhile
            return Cancelled(f"{ticket.request.log_id}request was cancelled")
        return self.run([ticket])[0][0]

    def _split(self, batch: Sequence[Ticket], results: Mapping[str, object]) -> list[Answer]:
        outputs = self._checked(results, sum(ticket.rows for ticket in batch), _wanted(batch))
        if len(batch) == 1:
            request = batch[0].request
            names = request.outputs or outputs
            return [self.respond(request, {name: outputs[name] for name in names})]
        answers: list[Answer] = []
        begin = 0
        for ticket in batch:
            request, end = ticket.request, begin + ticket.rows
            names = request.outputs or outputs
            answers.append(self.respond(request, {name: _rows(outputs[name], begin, end) for name in names}))
            begin = end
        return answers

    def _checked(self, results: Mapping[str, object], rows: int, wanted: set[str] | None) -> dict[str, Tensor]:
        """The outputs in config order and client shape, or `BackendError` naming the one at fault."""
        outputs: dict[str, Tensor] = {}
        for name, spec in self.schema.outputs.items():
            if name in results:
                outputs[name] = self.schema.accept(spec, as_tensor(results[name]), rows)  # type: ignore[arg-type]
            elif wanted is None or name in wanted:
                raise BackendError(
                    f"model '{self.schema.name}': the backend gave no output '{name}', only {sorted(results)}"
                )
        return outputs


def _stack(batch: Sequence[Ticket]) -> Mapping[str, Tensor]:
    """The inputs of all requests, row under row; a single request's own inputs, uncopied."""
    first = batch[0].request.inputs
    if len(batch) == 1:
        return first  # type: ignore[return-value]  # Signature.check has refused all Undecoded
    return {name: concatenate([ticket.request.inputs[name] for ticket in batch]) for name in first}  # type: ignore[misc]


def _wanted(batch: Sequence[Ticket]) -> set[str] | None:
    """The outputs that somebody asked for; None for all."""
    if not all(ticket.request.outputs for ticket in batch):
        return None
    return {name for ticket in batch for name in ticket.request.outputs}


def _rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    return tensor.rows(begin, end) if isinstance(tensor, BytesTensor) else tensor[begin:end]


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


def runner_for(instance: AnyInstance, schema: OutputSchema) -> Runner:
    """The runner for the rung that ``instance`` stands on; asked once, at load."""
    if isinstance(instance, Instance):
        return RowsRunner(schema, instance)
    if isinstance(instance, RequestInstance):
        return RequestRunner(schema, instance)
    if isinstance(instance, StreamInstance):
        return StreamRunner(schema, instance)
    if isinstance(instance, DeferredInstance):
        return DeferredRunner(schema, instance)
    raise BackendError(
        f"model '{schema.name}': {type(instance).__name__} is no Instance, RequestInstance, StreamInstance or "
        "DeferredInstance"
    )


def run_batch(runner: Runner, batch: Sequence[Ticket]) -> tuple[Sequence[Given], BatchTimes]:
    """Run those of ``batch`` whose callers are still there; the others get `Cancelled`."""
    if not any(ticket.cancelled for ticket in batch):
        return runner.run(batch)
    alive = [ticket for ticket in batch if ticket.pinned or not ticket.cancelled]
    now = monotonic_ns()
    answers, times = runner.run(alive) if alive else ((), BatchTimes(now, now, now, now))
    answered = iter(answers)
    return [
        next(answered)
        if ticket.pinned or not ticket.cancelled
        else Cancelled(f"{ticket.request.log_id}request was cancelled")
        for ticket in batch
    ], times
