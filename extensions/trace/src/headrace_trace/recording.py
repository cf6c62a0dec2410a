"""The record of one traced request, from its arrival to its answer.

::

    Tracer.admit     a `TracedCall` per sampled inference, and one per call of another model for it
    BatchObserver    adds the times of the batch in which it was executed; observes a model only while a call is traced
    TracedCall       is the `Watch` of the operation: adds its answers and its end
    RequestTrace     a request with its calls of other models; exported when all have ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import monotonic_ns
from typing import Any, NamedTuple

from headrace import (
    Answer,
    BatchTimes,
    Caller,
    InferRequest,
    InferResponse,
    ModelView,
    Observer,
    Outcome,
    Ticket,
    Watch,
)
from headrace_trace.generated_text import TEXT, GeneratedText
from headrace_trace.settings import Sampler
from headrace_trace.traced_tensors import CopiedTensor, copied

#: The calls that are traced now, of all servers in this process, by their callers.
OPEN: dict[Caller, TracedCall] = {}
#: The names of the events about sending an answer, without _START and _END, by transport.
_SENDS = {"http": "HTTP_SEND", "grpc": "GRPC_SEND"}
#: The prefix of response parameters that parts of the server add.
_OURS = "headrace_"
_ids = count(1)
_batches = count(1)


class ExecutedBatch(NamedTuple):
    """A batch that was executed: its times, the number of its requests, and the traced ones among them."""

    number: int
    times: BatchTimes
    requests: int
    calls: Sequence[TracedCall]


class RequestTrace:
    """The calls of one request: the client's, then those of models for it. Event loop only.

    ``collect`` is called when all have ended.
    """

    __slots__ = ("_open", "calls", "collect", "sampler")

    def __init__(self, sampler: Sampler, collect: Callable[[RequestTrace], None]) -> None:
        self.sampler, self.collect = sampler, collect
        self.calls: list[TracedCall] = []
        self._open = 0

    def add(self, call: TracedCall) -> None:
        self.calls.append(call)
        self._open += 1

    def free(self) -> None:
        """Drop the calls, which refer to this object: they are written, or dropped."""
        for call in self.calls:
            call.batch = None
        self.calls = []

    def over(self) -> None:
        """Note that one call is over."""
        self._open -= 1
        if not self._open:
            self.collect(self)


class TracedCall(Watch):
    """One traced inference. ``events`` are names and monotonic nanoseconds, in any order."""

    __slots__ = (
        "_caller",
        "_leave",
        "batch",
        "context",
        "error",
        "events",
        "id",
        "is_cached",
        "model",
        "parent",
        "request_id",
        "said",
        "tensors",
        "text",
        "trace",
        "version",
    )  # fmt: skip

    def __init__(self, caller: Caller, model: str, trace: RequestTrace, parent: TracedCall | None = None) -> None:
        self._caller, self.model, self.trace, self.parent = caller, model, trace, parent
        self.id = next(_ids)
        self.version = 0
        self.request_id = ""
        self.events: list[tuple[str, int]] = []
        #: The activity, when, and the tensor.
        self.tensors: list[tuple[str, int, CopiedTensor]] = []
        self.batch: ExecutedBatch | None = None
        self.error: str = ""
        #: The parameters ``headrace_*`` of the response, such as the target of a router.
        self.parameters: Mapping[str, Any] = {}
        #: The text so far, of a model that generates text.
        self.text: GeneratedText | None = None
        #: True if its response came from the cache.
        self.is_cached = False
        #: Ends the observation of the model.
        self._stop_observing: Callable[[], None] | None = None
        #: Data of the exporter for this call.
        self.context: Any = None
        OPEN[caller] = self
        if parent is not None:
            parent.is_cached = False
        trace.add(self)

    @property
    def transport(self) -> str:
        return self._caller.transport

    def mark(self, name: str, at_ns: int = 0) -> None:
        self.events.append((name, at_ns or monotonic_ns()))

    def arrived(self) -> None:
        """Note when the request of a client was received."""
        if self._caller.transport == "http":
            self.mark("HTTP_RECV_START", self._caller.arrival_ns)
            self.mark("HTTP_RECV_END", self._caller.arrival_ns)
        elif self._caller.transport == "grpc":
            self.mark("GRPC_WAITREAD_START", self._caller.arrival_ns)
            self.mark("GRPC_WAITREAD_END", self._caller.arrival_ns)
        self._caller.on_sent = self._sent

    def submitted(self, request: InferRequest, view: ModelView) -> None:
        """Record that the request was read and is queued for its model."""
        self.version, self.request_id = view.version, request.id
        if self._stop_observing is None and not view.config.HasField(
            "ensemble_scheduling"
        ):  # it has no executions itself
            self._stop_observing = view.observe(_OBSERVER)
        self.is_cached = view.config.response_cache.enable  # until a batch, a call or an error shows otherwise
        self.mark("REQUEST_START")
        self.mark("QUEUE_START")
        if self.trace.sampler.takes_tensors:
            self._keep("TENSOR_QUEUE_INPUT", request.inputs)

    def executed(self, ticket: Ticket, batch: ExecutedBatch) -> None:
        """Note the batch in which the request was executed. Any thread."""
        self.batch, self.is_cached = batch, False
        start_ns, input_end_ns, infer_end_ns, end_ns = batch.times
        self.events += [
            ("COMPUTE_START", start_ns),
            ("COMPUTE_INPUT_END", input_end_ns),
            ("COMPUTE_OUTPUT_START", infer_end_ns),
            ("COMPUTE_END", end_ns),
        ]

    def answered(self, answer: Answer, final: bool) -> None:
        if isinstance(answer, InferResponse):
            if answer.parameters:
                self.parameters = {name: each for name, each in answer.parameters.items() if name.startswith(_OURS)}
            if self.trace.sampler.takes_tensors:
                self._keep("TENSOR_BACKEND_OUTPUT", answer.outputs)
            if TEXT in answer.outputs:
                self.text = self.text or GeneratedText(self._caller.arrival_ns)
                self.text.add(answer)
        if final:
            if self.text is not None:
                self.mark("FIRST_RESPONSE", self.text.first_ns)
            if self.parent is None:
                self.mark("INFER_RESPONSE_COMPLETE")
            self.mark("REQUEST_END")

    def ended(self, outcome: Outcome) -> None:
        if self._caller.transport in _SENDS:
            self.mark(f"{_SENDS[self._caller.transport]}_START")
        if outcome.error is not None:
            self.error, self.is_cached = outcome.error.message, False
        asyncio.get_running_loop().call_soon(self._close)

    def _sent(self) -> None:
        if self._caller.transport in _SENDS and self._caller.on_sent is not None:
            self._caller.on_sent = None
            self.mark(f"{_SENDS[self._caller.transport]}_END")

    def _keep(self, activity: str, tensors: Mapping[str, Any]) -> None:
        now_ns = monotonic_ns()
        self.tensors += [(activity, now_ns, tensor) for tensor in copied(tensors)]

    def _close(self) -> None:
        if self._stop_observing is not None:
            self._stop_observing()
        self._sent()  # a host may not report the time
        OPEN.pop(self._caller, None)
        self.trace.over()


class BatchObserver(Observer):
    """Finds the traced requests of each batch."""

    def batch_finished(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        found: list[TracedCall] = []
        batch = ExecutedBatch(next(_batches), times, len(succeeded) + len(failed), found)
        for ticket in (*succeeded, *failed):
            sender = ticket.request.sender
            call = None if sender is None else OPEN.get(sender)
            if call is not None:
                found.append(call)
                call.executed(ticket, batch)


_OBSERVER = BatchObserver()
