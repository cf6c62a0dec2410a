"""An inference request to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidArgument
from headrace.messages.tensor import BytesTensor, Tensor, as_tensor

if TYPE_CHECKING:
    from headrace.messages.caller import Caller
    from headrace.messages.ticket import Ticket, Watcher

Parameter: TypeAlias = "str | int | bool | float"

#: The most inputs of a request. No model has nearly as many; to decode many more would block the event loop.
MAX_INPUTS = 4096


@dataclass(slots=True, frozen=True)
class Undecoded:
    """An input that cannot be decoded to a `Tensor`: its bytes do not fit its shape, or its data type is unknown.
    ``Signature.check`` always refuses it; it finds Triton's first error in Triton's order."""

    datatype: str
    shape: tuple[int, ...]
    buffer: memoryview

    @property
    def element_count(self) -> int:
        return prod(self.shape)


# Not ``frozen``: that would make the construction of a request several times slower. With ``Final``, the type checker
# refuses every assignment, and the tests run with a class that refuses it at run time.
@dataclass(slots=True, eq=False)
class InferRequest:
    """An inference request. It never changes. Compared and hashed by identity.

    ``inputs`` are views of the receive buffer, in the order sent. ``outputs`` are the names of the requested outputs;
    empty means all. ``timeout_us`` 0 means no timeout. The state of its execution is in its `Ticket`.
    """

    model_name: Final[str]
    inputs: Final[Mapping[str, Tensor | Undecoded]]
    outputs: Final[Sequence[str]] = ()
    id: Final[str] = ""
    model_version: Final[str] = ""
    parameters: Final[Mapping[str, Parameter]] = field(default_factory=dict)
    priority: Final[int] = 0
    timeout_us: Final[int] = 0
    sequence_id: Final[int | str] = 0
    sequence_start: Final[bool] = False
    sequence_end: Final[bool] = False
    #: The models whose executions wait for this request, outermost first; empty unless a model sent it.
    callers: Final[tuple[str, ...]] = ()
    #: The request whose execution sent this one; None for a client's request.
    caller: Final[InferRequest | None] = None
    #: True if the sender accepts any number of responses. Set by models only: for a client, its transport decides.
    decoupled: Final[bool] = False
    #: An object shared by requests that differ only in ids and in tensor bytes, and have no strings; None if that was
    #: not detected. A model accepts either all of them or none.
    alike: Final[object] = None
    #: Set by `expire_at`, on the few requests that have a deadline, and by `send_as`.
    _deadline_ns: int = field(init=False, repr=False)
    #: Set by `send_as`, if the server has interceptors.
    _sender: Caller = field(init=False, repr=False)
    #: The ticket, set by `Ticket.begin`. `Ticket.end` replaces it with its ``cancelled``, to break the reference cycle.
    _execution: Ticket | bool = field(init=False, repr=False)

    @property
    def cancelled(self) -> bool:
        """True if the caller has disconnected or wants no further responses. For the instance that executes the
        request: it is False before the execution. Any thread."""
        execution = getattr(self, "_execution", False)
        return execution if isinstance(execution, bool) else execution.cancelled

    @property
    def deadline_ns(self) -> int:
        """The deadline of this request, or else of the request whose execution sent it, in nanoseconds of the monotonic
        clock; 0 for none."""
        request: InferRequest | None = self
        while request is not None:
            deadline_ns: int = getattr(request, "_deadline_ns", 0)
            if deadline_ns:
                return deadline_ns
            request = request.caller
        return 0

    @property
    def sender(self) -> Caller | None:
        """The sender of this request, or else of the request whose execution sent it; None if the server has no
        interceptors."""
        request: InferRequest | None = self
        while request is not None:
            sender: Caller | None = getattr(request, "_sender", None)
            if sender is not None:
                return sender
            request = request.caller
        return None

    @property
    def has_terms(self) -> bool:
        """True if this request, or one whose execution sent it, may have a deadline or a sender."""
        request: InferRequest | None = self
        while request is not None:
            if hasattr(request, "_deadline_ns"):
                return True
            request = request.caller
        return False

    def send_as(self, caller: Caller) -> None:
        """Set the sender. Call this before the request is submitted."""
        self._sender = caller
        if not hasattr(self, "_deadline_ns"):
            self._deadline_ns = 0  # `_altered` and `has_terms` check only this attribute

    def expire_at(self, deadline_ns: int) -> None:
        """Set the deadline. Only the sender may call this, before it submits the request. The sender must also cancel
        the request at that time."""
        self._deadline_ns = deadline_ns

    def with_inputs(self, inputs: Mapping[str, Tensor | Undecoded]) -> InferRequest:
        """Return the same request with other inputs."""
        return self._altered(inputs, self.outputs, self.parameters)

    def with_outputs(self, outputs: Sequence[str]) -> InferRequest:
        """Return the same request for other outputs."""
        return self._altered(self.inputs, outputs, self.parameters)

    def with_parameters(self, parameters: Mapping[str, Parameter]) -> InferRequest:
        """Return the same request with other parameters."""
        return self._altered(self.inputs, self.outputs, parameters)

    def with_timeout(self, timeout_us: int) -> InferRequest:
        """Return the same request with another timeout."""
        return self._altered(self.inputs, self.outputs, self.parameters, timeout_us)

    def with_sequence(self, id: int | str, start: bool, end: bool) -> InferRequest:
        """Return the same request as a request of the sequence ``id``, with these flags."""
        return self._altered(self.inputs, self.outputs, self.parameters, None, (id, start, end))

    def _altered(
        self,
        inputs: Mapping[str, Tensor | Undecoded],
        outputs: Sequence[str],
        parameters: Mapping[str, Parameter],
        timeout_us: int | None = None,
        sequence: tuple[int | str, bool, bool] | None = None,
    ) -> InferRequest:
        sequence_id, start, end = sequence or (self.sequence_id, self.sequence_start, self.sequence_end)
        kind = type(self)
        # On the hot path of sequences: all their requests whose model gets control inputs or a state are altered here.
        altered = kind(
            self.model_name,
            inputs,
            outputs,
            self.id,
            self.model_version,
            parameters,
            self.priority,
            self.timeout_us if timeout_us is None else timeout_us,
            sequence_id,
            start,
            end,
            self.callers,
            self.caller,
            self.decoupled,
            *(() if kind is InferRequest else (None, *self._further())),
        )
        if hasattr(self, "_deadline_ns"):
            altered._deadline_ns = self._deadline_ns
            if hasattr(self, "_sender"):
                altered._sender = self._sender
        return altered

    def _further(self) -> tuple[Any, ...]:
        """Return the fields that a subclass adds, in the order of its constructor."""
        return ()

    @property
    def is_in_sequence(self) -> bool:
        return self.sequence_id != 0 or self.sequence_start or self.sequence_end

    @property
    def log_id(self) -> str:
        """The prefix that Triton puts before messages about a request."""
        return log_id(self.id)


@dataclass(slots=True, eq=False)
class LocatedRequest(InferRequest):
    """A request with tensors outside of its message (`headrace_locations.tensor_locations`).

    ``targets`` is writable memory for outputs, by their names. An executor may write an output there itself, and then
    answer with a view of that memory; all other outputs are copied when the response is encoded. ``release`` is a
    watcher that releases the inputs with the last answer, and ``on_device`` is `Ticket.on_device` (`ticket_of`).
    """

    targets: Final[Mapping[str, memoryview]] = field(default_factory=dict)
    release: Final[Watcher | None] = None
    on_device: Final[Mapping[str, bool] | None] = None

    def _further(self) -> tuple[Any, ...]:
        return self.targets, self.release, self.on_device

    @classmethod
    def of(cls, request: InferRequest, targets: Mapping[str, memoryview], *more: Any) -> LocatedRequest:
        """Return ``request`` with these: ``more`` are ``release`` and ``on_device``."""
        located = cls(*[*[getattr(request, name) for name in _DECODED], targets, *more])
        for name in ("_deadline_ns", "_sender"):
            if hasattr(request, name):
                setattr(located, name, getattr(request, name))
        return located


#: The fields of a request that its constructor takes.
_DECODED = [each.name for each in fields(InferRequest) if each.init]


def log_id(request_id: str) -> str:
    """Return `InferRequest.log_id`, for messages before there is a request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def too_many_inputs(count: int) -> InvalidArgument:
    """Return the error for a request with more than `MAX_INPUTS` inputs, which a frontend does not decode."""
    return InvalidArgument(f"request has {count} inputs, the limit is {MAX_INPUTS}")


def with_strings_encoded(request: InferRequest) -> InferRequest:
    """Return ``request`` with its arrays of strings in wire form; the same object if it has none."""
    for value in request.inputs.values():
        if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
            arrays = {name: each for name, each in request.inputs.items() if isinstance(each, np.ndarray)}
            return request.with_inputs({**request.inputs, **as_tensors(arrays)})
    return request


def as_tensors(inputs: Mapping[str, npt.ArrayLike | BytesTensor]) -> dict[str, Tensor]:
    """Return ``inputs`` of a program as tensors. Raises `InvalidArgument` for text that UTF-8 can not encode."""
    try:
        return {name: as_tensor(value) for name, value in inputs.items()}
    except UnicodeEncodeError as error:
        text = f"{error.object[error.start : error.start + 1]!r} is half a surrogate pair, which UTF-8 can not encode"
        raise InvalidArgument(f"input '{_first_unencodable(inputs)}': {text}") from None


def _first_unencodable(inputs: Mapping[str, npt.ArrayLike | BytesTensor]) -> str:
    for name, value in inputs.items():
        try:
            as_tensor(value)
        except UnicodeEncodeError:
            return name
    return ""
