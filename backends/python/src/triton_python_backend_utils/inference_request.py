"""One inference request: one that a model received, or one that it makes for another model.

Source: docs/spec/behaviours.md sections 9.2 and 9.5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Literal, overload

from headrace import Answer, Call
from triton_python_backend_utils import bls
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.arguments import UINT32, Text, instance, truth, whole_number
from triton_python_backend_utils.attributes import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceTrace,
    Parameter,
    PreferredMemory,
    checked_inputs,
    request_template,
)
from triton_python_backend_utils.bls import ResponseIterator
from triton_python_backend_utils.error import TritonModelException
from triton_python_backend_utils.inference_response import InferenceResponse, InferenceResponseSender
from triton_python_backend_utils.named_tensor import Tensor, named_among
from triton_python_backend_utils.runtime import Runtime

if TYPE_CHECKING:
    import asyncio

#: Held while a sender is created, so that two threads get the same one.
_SENDER = Lock()


class InferenceRequest:
    """A request to a model, or from a model to another one.

    For ``model_version`` -1, the server chooses. ``timeout`` is in microseconds. ``flags`` are the sum of
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END. Outputs are in memory of the host, except for an instance on a
    GPU in a process: unless ``preferred_memory`` is the CPU's, they stay in the memory in which they were produced.

    Raises `TritonModelException` and TypeError for invalid arguments, and UnicodeDecodeError for bytes that are not
    text.
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_caller",
        "_callers",
        "_ended",
        "_flags",
        "_inputs",
        "_outputs",
        "_prefers_host",
        "_release_flags",
        "_runtime",
        "_sender",
        "_source",
        "_trace",
    )

    def __init__(
        self,
        request_id: Text = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[Text] | None = None,
        model_name: Text | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("InferenceRequest() needs inputs, requested_output_names and model_name")
        self._inputs: list[Tensor] | None = checked_inputs(inputs)
        self._source = request_template(
            request_id,
            correlation_id,
            self._inputs,
            requested_output_names,
            model_name,
            model_version,
            timeout,
            parameters,
        )
        self._outputs: Sequence[str] = self._source.outputs
        self._flags: int | None = whole_number(flags, "flags", UINT32)
        self._call: Call | None = None
        self._sender: InferenceResponseSender | None = None
        self._ended = True
        self._runtime: Runtime | None = runtimes.current()
        self._callers, self._caller = runtimes.callers(), runtimes.caller()
        if preferred_memory is not None:
            instance(preferred_memory, PreferredMemory, "preferred_memory")
        self._prefers_host = preferred_memory is not None and preferred_memory._is_host
        if trace is not None:
            instance(trace, InferenceTrace, "trace")
        self._trace = trace
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        """Return the inputs in the order sent; always the same list."""
        if self._inputs is None:
            self._inputs = [Tensor._received(name, value) for name, value in self._source.inputs.items()]  # type: ignore[arg-type]  # checked inputs
        return self._inputs

    def request_id(self) -> str:
        return self._source.id

    def correlation_id(self) -> int | str:
        return self._source.sequence_id

    def requested_output_names(self) -> set[str]:
        return set(self._outputs)

    def model_name(self) -> str:
        return self._source.model_name

    def model_version(self) -> int:
        """The requested version; -1 for none."""
        return int(self._source.model_version or -1)

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END, added up."""
        if self._flags is None:
            start = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if self._source.sequence_start else 0
            self._flags = start + (TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if self._source.sequence_end else 0)
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = whole_number(flags, "flags", UINT32)

    def timeout(self) -> int:
        """The timeout in microseconds; 0 for none."""
        return self._source.timeout_us

    def parameters(self) -> str:
        """Return the parameters as JSON text; a server writes it without blanks, as Triton does."""
        separators = None if self._call is None else (",", ":")
        return json.dumps(dict(self._source.parameters), separators=separators)

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace._of(self._source.sender)

    def is_cancelled(self) -> bool:
        """True if the caller has disconnected."""
        return self._source.cancelled

    @overload
    def exec(self, decoupled: Literal[False] = False) -> InferenceResponse: ...

    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...

    @overload
    def exec(self, decoupled: bool) -> InferenceResponse | ResponseIterator: ...

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Return the model's response, or an iterator over the responses of a ``decoupled`` one as they arrive. Blocks.

        An error is in the response. Raises `TritonModelException` outside ``execute``.
        """
        return bls.stream(self) if truth(decoupled, "decoupled") else bls.execute(self)

    @overload
    def async_exec(self, decoupled: Literal[False] = False) -> asyncio.Future[InferenceResponse]: ...

    @overload
    def async_exec(self, decoupled: Literal[True]) -> asyncio.Future[ResponseIterator]: ...

    @overload
    def async_exec(self, decoupled: bool) -> asyncio.Future[InferenceResponse] | asyncio.Future[ResponseIterator]: ...

    def async_exec(
        self, decoupled: bool = False
    ) -> asyncio.Future[InferenceResponse] | asyncio.Future[ResponseIterator]:
        """Return a future of the result of `exec`. Raises RuntimeError without a running loop."""
        return bls.stream_async(self) if truth(decoupled, "decoupled") else bls.execute_async(self)

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the one sender of this request. Raises `TritonModelException` for a request that the model made."""
        with _SENDER:
            if self._sender is None:
                if self._call is None:
                    raise TritonModelException("A request that was not received has no response sender.")
                decoupled = self._runtime is not None and self._runtime.decoupled
                self._sender = InferenceResponseSender(self._call, decoupled, self._ended)
            return self._sender

    def set_release_flags(self, flags: int) -> None:
        """TRITONSERVER_REQUEST_RELEASE_ALL, or _RESCHEDULE: execute this request again."""
        self._release_flags = whole_number(flags, "flags", UINT32)

    @classmethod
    def _received(cls, call: Call, runtime: Runtime, outputs: Sequence[str] = ()) -> InferenceRequest:
        """Return the request of ``call``, with the output names ``outputs`` if the caller has none.

        If a decoupled model drops the request unanswered, it ends.
        """
        request = cls.__new__(cls)
        request._call = call
        request._source = call.request
        request._outputs = call.request.outputs or outputs
        request._runtime = runtime
        request._inputs = request._trace = request._flags = None
        request._callers, request._caller = call.request.callers, call.request
        request._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        request._ended = False
        request._sender = InferenceResponseSender(call, True) if runtime.decoupled else None
        return request

    def _close(self) -> bool:
        """True if this request has neither a sender nor an answer: ``execute`` then returns its answer.

        A sender that is requested after this is closed.
        """
        with _SENDER:
            is_open, self._ended = self._sender is None and not self._ended, True
        return is_open

    def _finish(self, answer: Answer) -> bool:
        """Send the last answer, unless it was sent. Return True if this call sent it. Later answers are refused."""
        call = self._call
        if call is None:
            return False
        with _SENDER:
            sender, ended, self._ended = self._sender, self._ended, True
        if sender is not None:
            return sender._finish(answer)
        if not ended:
            call.send(answer, True)
        return not ended

    @property
    def _has_sender(self) -> bool:
        """True if the model has requested the sender, which then answers or ends this request."""
        return self._sender is not None

    @property
    def _rescheduled(self) -> bool:
        return self._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input ``name``, None if the request has no such input."""
    return named_among(inference_request.inputs(), name)
