"""Rung 1: stack the rows of a batch, execute once, split the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic_ns

from headrace.backends.base import Instance
from headrace.errors import BackendError, Cancelled
from headrace.messages.response import Answer
from headrace.messages.tensor import BytesTensor, Tensor, as_tensor, concatenate
from headrace.messages.ticket import Ticket
from headrace.telemetry.statistics import BatchTimes
from headrace.workers.output_schema import OutputSchema
from headrace.workers.runner import Runner, as_error


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
            if len(batch) > 1 and not batch[0].pinned:
                # Rows are independent, so the others can be answered without the culprit.
                answers = [self._run_alone(ticket) for ticket in batch]
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
