"""One inference request: what a caller asks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from headrace.errors import InvalidArgument
from headrace.messages.tensor import Tensor, as_tensor

if TYPE_CHECKING:
    from headrace.messages.caller import Caller
    from headrace.messages.ticket import Ticket

Parameter: TypeAlias = "str | int | bool | float"

#: Inputs that a request may have. No model comes near; decoding many more would hold the event loop.
MAX_INPUTS = 4096


@dataclass(slots=True, frozen=True)
class Undecoded:
    """An input that cannot become a `Tensor`: its bytes contradict its shape, or its data type
    is unknown. ``Signature.check`` always refuses it, and words the refusal in Triton's order."""

    datatype: str
    shape: tuple[int, ...]
    buffer: memoryview

    @property
    def element_count(self) -> int:
        return prod(self.shape)


# Not ``frozen``: that would make the construction of a request several times as dear. ``Final`` has the type checker
# refuse every assignment, and the tests run with a class that refuses it, too.
@dataclass(slots=True, eq=False)
class InferRequest:
    """What a caller asks of a model; it never changes. Compared and hashed by identity.

    ``inputs`` are views on the received buffer, in the order sent. ``outputs`` are the names
    requested; empty means all. ``timeout_us`` 0 means none. What becomes of it is its `Ticket`'s.
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
    #: The request in whose execution a model sent this one; None for a client's.
    caller: Final[InferRequest | None] = None
    #: Whether the sender takes any number of responses. Clients' requests leave it to their transport.
    decoupled: Final[bool] = False
    #: The same for requests that differ in their ids and the bytes of their tensors only, of which none are strings;
    #: None where nobody has noticed. Whether a model takes one of them, it takes all.
    alike: Final[object] = None
    #: Set by `expire_at`, for the few that are to be answered by a time, and by `send_as`.
    _deadline_ns: int = field(init=False, repr=False)
    #: Set by `send_as`, where the server has interceptors.
    _sender: Caller = field(init=False, repr=False)
    #: Set by `Ticket.begin`; by `Ticket.end`, because they would keep each other, to whether it was cancelled.
    _execution: Ticket | bool = field(init=False, repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether the caller has gone, or wants no more. For the instance that executes the request: before, it is
        False. Any thread."""
        execution = getattr(self, "_execution", False)
        return execution if isinstance(execution, bool) else execution.cancelled

    @property
    def deadline_ns(self) -> int:
        """When nobody wants an answer any more, to this request or to that for which a model sent it; 0 for never.
        Monotonic."""
        request: InferRequest | None = self
        while request is not None:
            deadline_ns: int = getattr(request, "_deadline_ns", 0)
            if deadline_ns:
                return deadline_ns
            request = request.caller
        return 0

    @property
    def sender(self) -> Caller | None:
        """Who sent this request, or that for which a model sent it; None if the server has no interceptors."""
        request: InferRequest | None = self
        while request is not None:
            sender: Caller | None = getattr(request, "_sender", None)
            if sender is not None:
                return sender
            request = request.caller
        return None

    @property
    def has_terms(self) -> bool:
        """True if this request, or that for which a model sent it, may have a deadline or a sender."""
        request: InferRequest | None = self
        while request is not None:
            if hasattr(request, "_deadline_ns"):
                return True
            request = request.caller
        return False

    def send_as(self, caller: Caller) -> None:
        """Say who sends this request. To be called before it is submitted."""
        self._sender = caller
        if not hasattr(self, "_deadline_ns"):
            self._deadline_ns = 0  # `_altered` looks for it only

    def expire_at(self, deadline_ns: int) -> None:
        """Say when nobody wants an answer any more. For whoever made the request, before it is submitted: what cancels
        it then is the sender's, too."""
        self._deadline_ns = deadline_ns

    def with_inputs(self, inputs: Mapping[str, Tensor | Undecoded]) -> InferRequest:
        """The same request with other inputs."""
        return self._altered(inputs, self.outputs, self.parameters)

    def with_outputs(self, outputs: Sequence[str]) -> InferRequest:
        """The same request for other outputs."""
        return self._altered(self.inputs, outputs, self.parameters)

    def with_parameters(self, parameters: Mapping[str, Parameter]) -> InferRequest:
        """The same request with other parameters."""
        return self._altered(self.inputs, self.outputs, parameters)

    def with_timeout(self, timeout_us: int) -> InferRequest:
        """The same request with another timeout."""
        return self._altered(self.inputs, self.outputs, self.parameters, timeout_us)

    def with_sequence(self, id: int | str, start: bool, end: bool) -> InferRequest:
        """The same request as one of the sequence ``id``, with these flags."""
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
        # Every request of a sequence whose model is told of it, or has a state, comes this way.
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
        """The fields that a subclass has besides, in the order of its constructor."""
        return ()

    @property
    def is_in_sequence(self) -> bool:
        return self.sequence_id != 0 or self.sequence_start or self.sequence_end

    @property
    def log_id(self) -> str:
        """The prefix that Triton puts before messages about a request."""
        return log_id(self.id)


def log_id(request_id: str) -> str:
    """`InferRequest.log_id`, for what is said before there is a request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def too_many_inputs(count: int) -> InvalidArgument:
    """What a frontend raises instead of decoding more than `MAX_INPUTS`."""
    return InvalidArgument(f"request has {count} inputs, the limit is {MAX_INPUTS}")


def with_strings_encoded(request: InferRequest) -> InferRequest:
    """Return ``request`` with its arrays of strings in wire form; the same object if it has none."""
    for value in request.inputs.values():
        if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
            return request.with_inputs(
                {
                    name: as_tensor(each) if isinstance(each, np.ndarray) else each
                    for name, each in request.inputs.items()
                }
            )
    return request
