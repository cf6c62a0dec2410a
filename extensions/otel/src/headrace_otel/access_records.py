"""A record of each operation, also if it is refused or fails: ``--otel-access``.

The records of most inferences are made by core, as for the access log; for the others an `_Operation` watches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from headrace import (
    AnyOperation,
    Caller,
    FinishedInference,
    InferRequest,
    InferResponse,
    Interceptor,
    Outcome,
    ServerOptions,
    Watch,
)
from headrace_otel.otel_options import OtelOptions
from headrace_otel.record_queue import RecordQueue

if TYPE_CHECKING:
    from headrace import Answer, ModelView

#: The maximum characters of a caller's text.
_LONGEST = 256


class AccessRecord(NamedTuple):
    """An operation that is over. Without the ``version`` of ``finished``, it was refused before it was read."""

    finished: FinishedInference
    operation: str
    #: The number of its responses.
    responses: int


class AccessRecords(Interceptor):
    """Adds a record of each operation to the queue. A call between models is part of its inference."""

    name: ClassVar[str] = "otel-access"
    first: ClassVar[bool] = True

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        group = options.group(OtelOptions)
        self._is_on = group.access
        if self._is_on:
            self.recorder = self._queue = group.queue
            self._running: dict[Caller, _Operation] = {}

    @property
    def enabled(self) -> bool:
        return self._is_on

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | None:
        if caller.transport == "model":
            return None
        watch = self._running[caller] = _Operation(caller, self._queue, self._running)
        return watch

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> None:
        watch = self._running.get(caller)
        if watch is not None:
            watch.version, watch.id = model.version, request.id[:_LONGEST]
            watch.request_bytes = sum([getattr(tensor, "nbytes", 0) for tensor in request.inputs.values()])


class _Operation(Watch):
    """An operation that is not over."""

    def __init__(self, caller: Caller, queue: RecordQueue, running: dict[Caller, _Operation]) -> None:
        self._caller, self._queue, self._running = caller, queue, running
        self.version = self.request_bytes = self._response_bytes = self._responses = 0
        self.id = ""

    def answered(self, answer: Answer, final: bool) -> None:
        if isinstance(answer, InferResponse):
            self._responses += 1
            self._response_bytes += sum([tensor.nbytes for tensor in answer.outputs.values()])

    def ended(self, outcome: Outcome) -> None:
        caller = self._caller
        del self._running[caller]
        trace = caller.trace_context.get("traceparent", "")[:_LONGEST]
        finished = FinishedInference(
            outcome.begun_ns, caller.transport, caller.peer, caller.principal, trace, caller.model[:_LONGEST],
            self.version, self.id, self.request_bytes, None if outcome.error is None else outcome.error.code,
            self._response_bytes, outcome.ended_ns, 0, None,
        )  # fmt: skip
        self._queue.add(AccessRecord(finished, str(caller.operation), self._responses))
