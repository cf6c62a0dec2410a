"""One inference request, from the moment a frontend has decoded it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from time import monotonic_ns
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import InvalidArgument
from headrace.messages.response import Answer
from headrace.messages.tensor import Tensor

if TYPE_CHECKING:
    from headrace.messages.response import InferResponse

Parameter: TypeAlias = "str | int | bool | float"

#: Inputs that a request may have. No model comes near; decoding many more would hold the event loop.
MAX_INPUTS = 4096

#: Responses that the caller of a decoupled request may have unread before its model must wait.
UNREAD = 64

#: Called on the event loop with each answer; the second argument is true exactly once, last.
#: ``None`` with true ends a decoupled request that has nothing more to say.
Respond: TypeAlias = Callable[[Answer, bool], None]


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


@dataclass(slots=True, eq=False)
class InferRequest:
    """What a frontend asks of a model. Compared and hashed by identity.

    The frontend fills the first block. ``inputs`` are views on the received buffer, in the order
    sent. ``outputs`` are the names requested; empty means all. ``timeout_us`` 0 means none. Once
    ``submit`` returns, the request belongs to the scheduler; whoever removes it from the queue
    owns it, and calls ``respond`` on the event loop.
    """

    model_name: str
    inputs: dict[str, Tensor | Undecoded]
    respond: Respond
    outputs: Sequence[str] = ()
    id: str = ""
    model_version: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: The models whose executions wait for this request, outermost first; empty unless a model sent it.
    callers: tuple[str, ...] = ()
    #: The request in whose execution a model sent this one; None for a client's.
    caller: InferRequest | None = None
    #: Whether the sender takes any number of responses. Clients' requests leave it to their transport.
    decoupled: bool = False
    #: Set by a sender who waits on a thread for one response: it is given it on the thread that made it,
    #: before the event loop hears of it and calls ``respond`` as ever. May not be called at all.
    respond_at_once: Callable[[InferResponse], None] | None = None
    arrival_ns: int = field(default_factory=monotonic_ns)

    #: Set by ``Signature.check``: rows along the batch axis (1 for a model without one), and what
    #: must be equal among the requests of a batch (None when nothing can differ).
    rows: int = 1
    batch_key: object = None
    #: Set by the scheduler when it accepts the request.
    queued_ns: int = 0
    #: Set by a worker whose answer may come after its execution: when that began.
    started_ns: int = 0
    #: True once the caller has gone, or wants no more; read by long executions. Set by ``cancel`` and ``stop``.
    cancelled: bool = False
    #: True once nobody takes what is answered. Set by ``cancel`` only.
    abandoned: bool = False
    #: Set by whoever has the request: takes it out of the queue, or tells its execution.
    on_cancel: Callable[[InferRequest], None] | None = None
    #: Set by the worker: lets an execution go on that waits for its caller to read.
    on_read: Callable[[InferRequest], None] | None = None
    #: Set by the scheduler if the time of the request to wait may be over: when, 0 for never.
    deadline_ns: int = 0
    #: Set by the scheduler for a request that runs where it stands in its batch: not left out once it is cancelled,
    #: and not run again alone when its batch has failed.
    pinned: bool = False

    def cancel(self) -> None:
        """The caller has gone. Event loop only; safe to call at any time, more than once."""
        if not self.abandoned:
            self.cancelled = self.abandoned = True
            if self.on_cancel is not None:
                self.on_cancel(self)

    def stop(self) -> None:
        """The caller wants no more, and takes what is answered nevertheless. Event loop only, as `cancel`."""
        if not self.cancelled:
            self.cancelled = True
            if self.on_cancel is not None:
                self.on_cancel(self)

    def read(self) -> None:
        """The caller has taken one response that was not the last. Event loop only.

        Every `respond` of a decoupled request counts on it: a model that is `UNREAD` responses
        ahead waits.
        """
        if self.on_read is not None:
            self.on_read(self)

    @property
    def is_in_sequence(self) -> bool:
        return self.sequence_id != 0 or self.sequence_start or self.sequence_end

    @property
    def log_id(self) -> str:
        """The prefix that Triton puts before messages about a request."""
        return f"[request id: {self.id or '<id_unknown>'}] "


class Padding(InferRequest):
    """Nobody's request: rows that fill a batch up. No answer, no statistics. ``inputs`` are as the model takes them."""

    __slots__ = ()

    def __init__(self, model_name: str, inputs: Mapping[str, Tensor], rows: int = 1) -> None:
        super().__init__(model_name, dict(inputs), _unheard, rows=rows)


class Batch(list[InferRequest]):
    """What a scheduler has an instance run, where a list of requests does not say it all.

    ``added``: what each request gets as further inputs, in the order of the requests. ``pinned``: the batch runs as it
    is, whoever leaves meanwhile, and its requests are not tried one by one if it fails. It may hold `Padding`.
    """

    __slots__ = ("added", "pinned")

    def __init__(
        self,
        requests: Iterable[InferRequest],
        added: Sequence[Mapping[str, Tensor]] = (),
        pinned: bool = False,
    ) -> None:
        super().__init__(requests)
        self.added, self.pinned = added, pinned


def _unheard(answer: Answer, final: bool) -> None:
    """Nobody asked."""


def too_many_inputs(count: int) -> InvalidArgument:
    """What a frontend raises instead of decoding more than `MAX_INPUTS`."""
    return InvalidArgument(f"request has {count} inputs, the limit is {MAX_INPUTS}")
