"""Drives one instance: what the four kinds of instance of `headrace.backends.base` have in common, and the first two.

These are rows in and rows out (`RowsRunner`), and request by request (`RequestRunner`).
`headrace.executors.stream_runners` has the two with any number of responses. Everything runs on the instance's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from time import monotonic_ns
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from headrace.backends.base import Instance, RequestInstance
from headrace.errors import BackendError, Cancelled, HeadraceError, summary
from headrace.executors.output_schema import OutputSchema
from headrace.messages.device_tensor import DeviceTensor, StackedTensors, on_host
from headrace.messages.request import Parameter
from headrace.messages.response import Answer, InferResponse
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor, Tensor, concatenate
from headrace.messages.ticket import Batch, Padding, Ticket
from headrace.telemetry.executions import BatchTimes
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)


class Later(Enum):
    """The type of `LATER`."""

    LATER = "later"


#: Placeholder for a last answer that will go through the `AnswerSink`.
LATER: Final = Later.LATER

Returned: TypeAlias = "Answer | Later"


class AnswerSink(Protocol):
    """Receives answers that `Runner.run` does not return."""

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        """Pass on ``answer``. ``final`` is set exactly once per request, on the last. Never blocks, never raises.

        Any thread may call it. A finalizer may call it in the middle of another call on the same thread, so it must not
        hold a plain lock.
        """


class Runner(ABC):
    """Drives one instance. ``schema`` has the outputs that its model declares."""

    #: True if requests may bring `DeviceTensor`s, and get some: see `Ticket.on_device`.
    takes_device_tensors = False

    def __init__(self, schema: OutputSchema) -> None:
        self.schema = schema
        self.parameters: Mapping[str, Parameter] = MappingProxyType({})
        self.sink: AnswerSink

    def connect(self, sink: AnswerSink) -> None:
        """Send everything that `run` does not return to ``sink``. Called before `run`."""
        self.sink = sink

    @property
    def unanswered(self) -> Sequence[Ticket]:
        """The requests that have no last answer yet. Any thread."""
        return ()

    @abstractmethod
    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Returned], BatchTimes]:
        """Return the last answer of each request, in order, or `LATER`. Never raises because of the instance."""

    def close(self) -> None:
        """Answer the open requests with `Unavailable`. Called before the instance is closed."""


def as_error(error: BaseException, schema: OutputSchema) -> HeadraceError:
    """Return ``error`` as the caller gets it. Log an unexpected one with its traceback.

    Everything that an instance raises is an error of that execution: also `SystemExit`, a `KeyboardInterrupt` without a
    key, and the `CancelledError` of a task. None may end the thread, which all later requests need.
    """
    if isinstance(error, HeadraceError):
        return error
    context = {"model": schema.name, "version": schema.version}
    log.error("model '%s' version %s failed to execute", schema.name, schema.version, exc_info=error, extra=context)
    failure = BackendError(f"model '{schema.name}' failed to execute: {summary(error)}")
    failure.__cause__ = error
    return failure


def cancelled(ticket: Ticket) -> Cancelled:
    """Return the answer to a cancelled request."""
    return Cancelled(f"{ticket.request.log_id}request was cancelled")


class RowsRunner(Runner):
    """Runs an `headrace.Instance`: rows in, rows out."""

    def __init__(self, schema: OutputSchema, instance: Instance) -> None:
        super().__init__(schema)
        self._execute = instance.execute
        self.parameters = instance.response_parameters
        self._stack: Callable[[Sequence[Ticket]], Mapping[str, Tensor]] = _stack
        #: The outputs that are split row by row.
        self._in_rows = schema.outputs
        self._accept: Callable[[Spec, Any, int], Tensor] = schema.accept_result

    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        stacked = inferred = started
        try:
            inputs = self._stack(batch)
            stacked = monotonic_ns()
            results = self._execute(inputs)
            inferred = monotonic_ns()
            answers: Sequence[Answer] = self._split(batch, results)
        except BaseException as error:
            if len(batch) > 1 and not all(ticket.pinned for ticket in batch):
                # Rows are independent, so the other requests can be answered without the one that fails. Padding gets
                # no answer.
                answers = [None if ticket.pinned else self._run_alone(ticket) for ticket in batch]
            else:
                is_mapping = inferred == started or isinstance(results, Mapping)
                failure = as_error(error, self.schema) if is_mapping else self._no_mapping(results)
                answers = [failure] * len(batch)
            stacked, inferred = max(stacked, started), max(inferred, stacked)
        return answers, BatchTimes(started, stacked, inferred, monotonic_ns())

    def _no_mapping(self, results: object) -> BackendError:
        returned = f"model '{self.schema.name}': execute() returned {type(results).__name__}"
        return BackendError(f"{returned}, expected a dict of arrays by the name of the output")

    def _run_alone(self, ticket: Ticket) -> Answer:
        if ticket.cancelled:  # cancelled meanwhile
            return cancelled(ticket)
        return self.run([ticket])[0][0]

    def _split(self, batch: Sequence[Ticket], results: Mapping[str, object]) -> list[Answer]:
        rows = [ticket.rows for ticket in batch]
        outputs = self._checked(results, sum(rows), requested_names(batch))
        parts: list[dict[str, Tensor]] = [outputs] if len(batch) == 1 else [{} for _ in batch]
        if len(batch) > 1:
            for name, tensor in outputs.items():  # by output, because that takes a third of the time
                for own, part in zip(parts, split_rows(tensor, rows), strict=True):
                    own[name] = part
        answers: list[Answer] = []
        parameters, name, version = self.parameters, self.schema.name, self.schema.version
        for ticket, own in zip(batch, parts, strict=True):
            request = ticket.request
            if request.outputs:
                own = {output: own[output] for output in request.outputs}
            answers.append(InferResponse(own, parameters, name, version, request.id))
        if isinstance(batch, Batch):  # padding has no caller
            return [None if isinstance(ticket, Padding) else each for ticket, each in zip(batch, answers, strict=True)]
        return answers

    def _checked(self, results: Mapping[str, object], rows: int, wanted: set[str] | None) -> dict[str, Tensor]:
        """Return the outputs in the order of the config and the shape of clients. Raises `BackendError` with the
        output's name."""
        outputs: dict[str, Tensor] = {}
        for name, spec in self._in_rows.items():
            if name in results:
                outputs[name] = self._accept(spec, results[name], rows)
            elif wanted is None or name in wanted:
                raise BackendError(
                    f"model '{self.schema.name}': the backend returned no output '{name}', only {sorted(results)}"
                )
        return outputs


class DeviceRowsRunner(RowsRunner):
    """Runs an `headrace.Instance` that takes device tensors, and leaves outputs on the device for requests that take
    them there. Every other output is copied to the host once per batch."""

    takes_device_tensors = True

    def __init__(self, schema: OutputSchema, instance: Instance) -> None:
        super().__init__(schema, instance)
        self._stack, self._accept = self._stack_on_device, self._accept_on_device
        self._instance = instance

    def _stack_on_device(self, batch: Sequence[Ticket]) -> Mapping[str, Tensor]:
        self._instance.wants_device_tensors = bool([ticket for ticket in batch if hasattr(ticket, "on_device")])
        return _stack_on_device(batch)

    def _accept_on_device(self, spec: Spec, value: Any, rows: int) -> Tensor:
        return (self.schema.accept if isinstance(value, DeviceTensor) else self.schema.accept_result)(spec, value, rows)

    def _split(self, batch: Sequence[Ticket], results: Mapping[str, object]) -> list[Answer]:
        names = requested_names(batch)
        values = {name: value for name, value in results.items() if names is None or name in names}
        if not [ticket for ticket in batch if hasattr(ticket, "on_device")]:
            return super()._split(batch, {name: on_host(value) for name, value in values.items()})
        on_device = [getattr(ticket, "on_device", {}) for ticket in batch]
        for name, value in values.items():
            where = {each.get(name) for each in on_device}
            if isinstance(value, DeviceTensor) and where != {False}:
                host = value.to_host()  # of all rows: their parts share it
                values[name] = host if where == {None} else value
        answers = super()._split(batch, values)
        for taken, answer in zip(on_device, answers, strict=True):
            if isinstance(answer, InferResponse):
                outputs = answer.outputs.items()
                answer.outputs = {name: each if name in taken else on_host(each) for name, each in outputs}
        return answers


def _stack_on_device(batch: Sequence[Ticket]) -> Mapping[str, Tensor]:
    """Return the inputs as `_stack` does; those of several requests as `StackedTensors`, except strings."""
    first: Mapping[str, Any] = batch[0].request.inputs
    if len(batch) == 1:
        return first
    parts: Any = {name: [ticket.request.inputs[name] for ticket in batch] for name in first}
    return {name: concatenate(x) if type(x[0]) is BytesTensor else StackedTensors(x) for name, x in parts.items()}  # type: ignore[misc]


def _stack(batch: Sequence[Ticket]) -> Mapping[str, Tensor]:
    """Return the inputs of all requests, row under row. The inputs of a single request are not copied."""
    first = batch[0].request.inputs
    if len(batch) == 1:
        return first  # type: ignore[return-value]  # Signature.check has refused all Undecoded
    return {name: concatenate([ticket.request.inputs[name] for ticket in batch]) for name in first}  # type: ignore[misc]


def requested_names(batch: Sequence[Ticket]) -> set[str] | None:
    """Return the names of all requested outputs; None if a request takes all."""
    if not all(ticket.request.outputs for ticket in batch):
        return None
    return {name for ticket in batch for name in ticket.request.outputs}


def part_of_rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return rows ``begin:end`` of ``tensor`` without a copy."""
    return tensor.rows(begin, end) if isinstance(tensor, BytesTensor) else tensor[begin:end]


def split_rows(tensor: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    """Return consecutive parts of ``tensor`` without a copy. ``rows`` has the number of rows of each."""
    if type(tensor) is np.ndarray and rows.count(1) == len(rows):
        return list(tensor[:, np.newaxis])  # takes a quarter of the time of slices
    ends = list(accumulate(rows))
    return [part_of_rows(tensor, end - count, end) for count, end in zip(rows, ends, strict=True)]


class RequestRunner(Runner):
    """Runs a `headrace.RequestInstance`, which answers request by request."""

    def __init__(self, schema: OutputSchema, instance: RequestInstance) -> None:
        super().__init__(schema)
        self._execute = instance.execute_requests

    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        try:
            requests = [ticket.begin() for ticket in batch]
            returned = self._execute(requests)
            if len(returned) != len(batch):
                raise BackendError(
                    f"model '{self.schema.name}': the backend gave {len(returned)} answers for {len(batch)} requests"
                )
            inferred = monotonic_ns()
            answers = [self.schema.signed(*pair) for pair in zip(requests, returned, strict=True)]
        except BaseException as error:
            failure = as_error(error, self.schema)
            inferred = monotonic_ns()
            answers = [failure] * len(batch)
        for ticket in batch:
            ticket.end()
        return answers, BatchTimes(started, started, inferred, monotonic_ns())
