"""One inference request: one that a model received, or one that it makes for another model.

Source: behaviours.md sections 9.2 and 9.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

from penstock.backends.base import Call
from penstock.errors import PenstockError
from penstock.messages.request import InferRequest
from penstock.messages.response import Answer, InferResponse
from triton_python_backend_utils import flags as flag
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.error import TritonModelException
from triton_python_backend_utils.memory import PreferredMemory
from triton_python_backend_utils.parameters import Parameter, as_json, checked
from triton_python_backend_utils.runtime import Runtime
from triton_python_backend_utils.sender import InferenceResponseSender
from triton_python_backend_utils.tensor import Tensor
from triton_python_backend_utils.trace import InferenceTrace

#: Two threads that ask for a request's sender at once get the same.
_SENDER = Lock()


class InferenceRequest:
    """What a model is asked, or asks another model."""

    __slots__ = (
        "__weakref__",
        "_call",
        "_callers",
        "_ended",
        "_inputs",
        "_preferred_memory",
        "_release_flags",
        "_runtime",
        "_sender",
        "_source",
        "_trace",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._source = InferRequest(
            model_name,
            {},
            _unanswerable,
            tuple(requested_output_names),
            request_id,
            "" if model_version < 0 else str(model_version),
            checked(parameters),
            timeout_us=timeout,
            sequence_id=correlation_id,
        )
        self.set_flags(flags)
        self._inputs: list[Tensor] | None = list(inputs)
        self._call: Call | None = None
        self._sender: InferenceResponseSender | None = None
        self._ended = True
        self._runtime: Runtime | None = runtimes.current()
        self._callers = runtimes.callers()
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._release_flags = flag.TRITONSERVER_REQUEST_RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        """The inputs in the order sent; always the same list."""
        if self._inputs is None:
            self._inputs = [Tensor._received(name, value) for name, value in self._source.inputs.items()]  # type: ignore[arg-type]  # checked inputs
        return self._inputs

    def request_id(self) -> str:
        return self._source.id

    def correlation_id(self) -> int | str:
        return self._source.sequence_id

    def requested_output_names(self) -> set[str]:
        return set(self._source.outputs)

    def model_name(self) -> str:
        return self._source.model_name

    def model_version(self) -> int:
        """-1 if none is asked for."""
        return int(self._source.model_version or -1)

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END, added up."""
        start = flag.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if self._source.sequence_start else 0
        return start + (flag.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if self._source.sequence_end else 0)

    def set_flags(self, flags: int) -> None:
        self._source.sequence_start = bool(flags & flag.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        self._source.sequence_end = bool(flags & flag.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)

    def timeout(self) -> int:
        """In microseconds; 0 for none."""
        return self._source.timeout_us

    def parameters(self) -> str:
        """The parameters as JSON text."""
        return as_json(self._source.parameters)

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        """Whether the caller has gone."""
        return self._source.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """The one sender of this request. Raises `TritonModelException` for a request that the model made."""
        with _SENDER:
            if self._sender is None:
                if self._call is None:
                    raise TritonModelException("A request that was not received has no response sender.")
                decoupled = self._runtime is not None and self._runtime.decoupled
                self._sender = InferenceResponseSender(self._call, decoupled, self._ended)
            return self._sender

    def set_release_flags(self, flags: int) -> None:
        """TRITONSERVER_REQUEST_RELEASE_ALL, or _RESCHEDULE: execute this request again."""
        self._release_flags = flags

    @classmethod
    def _received(cls, call: Call, runtime: Runtime) -> InferenceRequest:
        """What the model is given for ``call``. One that is dropped unanswered by a decoupled model ends."""
        request = cls.__new__(cls)
        request._call = call
        request._source = call.request
        request._runtime = runtime
        request._inputs = request._preferred_memory = request._trace = None
        request._callers = call.request.callers
        request._release_flags = flag.TRITONSERVER_REQUEST_RELEASE_ALL
        request._ended = False
        request._sender = InferenceResponseSender(call, True) if runtime.decoupled else None
        return request

    def _finish(self, answer: Answer) -> bool:
        """Send the last answer, unless it was sent; whether this did it. What the model sends later is refused."""
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
        """Whether the model asked for the sender, which then answers or ends this request."""
        return self._sender is not None

    @property
    def _rescheduled(self) -> bool:
        return self._release_flags == flag.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


def _unanswerable(answer: InferResponse | PenstockError | None, final: bool) -> None:
    """A request that the model makes has an answer only once it is executed."""
