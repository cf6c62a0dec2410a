"""A request in flight: its callback for answers, its times and its cancellation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, TypeAlias

from headrace.messages.request import InferRequest, LocatedRequest
from headrace.messages.response import Answer
from headrace.messages.tensor import Tensor

if TYPE_CHECKING:
    from headrace.messages.response import InferResponse

#: A decoupled request may have this many responses that its caller has not read; then its model must wait.
UNREAD = 64

#: Called on the event loop with each answer. The second argument is True for the last answer only. ``None`` with True
#: ends a decoupled request without a further response.
Respond: TypeAlias = Callable[[Answer, bool], None]

#: Called with a ticket, each answer to it, and True if it is the last. Returns the answer that is passed on.
Watcher: TypeAlias = "Callable[[Ticket, Answer, bool], Answer]"


class Ticket:
    """A request in flight, from its submission to its final answer. Compared and hashed by identity.

    The sender makes the ticket, submits it, and may call `cancel`, `stop` and `read`. From then on, everything else
    belongs to the model queue. The code that removes the ticket from the queue owns it and answers it, on the event
    loop. Each answer passes ``watchers`` (`watch`) on its way to ``respond``, which never changes. ``request`` is
    replaced if the model gets other inputs or outputs than its caller sent: inputs that are reshaped or added, outputs
    that the caller does not get.
    """

    __slots__ = (
        "abandoned", "arrival_ns", "batch_key", "cancelled", "deadline_ns", "on_cancel", "on_device", "on_read",
        "pinned", "queued_ns", "request", "respond", "respond_at_once", "rows", "spans_ns", "started_ns", "times",
        "unread", "watchers",
    )  # fmt: skip

    def __init__(self, request: InferRequest, respond: Respond) -> None:
        self.request = request
        self.respond: Final = respond
        #: See `watch`. None for most requests.
        self.watchers: list[Watcher] | None = None
        #: Set by a sender that waits on a thread for one response. It is called with the response on the thread that
        #: made it, before the event loop calls ``respond`` as usual. It is optional: it may not be called at all.
        self.respond_at_once: Callable[[InferResponse], None] | None = None
        self.arrival_ns = monotonic_ns()
        #: Set by ``Signature.check``: the rows along the batch axis (1 for a model without one), and the key that all
        #: requests of a batch must share (None if any may be batched together).
        self.rows = 1
        self.batch_key: object = None
        #: Set by the model queue, before it calls `Scheduler.submit`.
        self.queued_ns = 0
        #: Set by an executor whose answers may follow the end of the execution: when the execution began.
        self.started_ns = 0
        #: True once the caller has disconnected or wants no further responses. Long executions poll it. Set by `cancel`
        #: and `stop`.
        self.cancelled = False
        #: True once all answers are discarded. Set by `cancel` only.
        self.abandoned = False
        #: Set by the owner of the ticket: removes it from the queue, or notifies its execution.
        self.on_cancel: Callable[[Ticket], None] | None = None
        #: Set by the executor: resumes an execution that waits until its caller has read a response.
        self.on_read: Callable[[Ticket], None] | None = None
        #: Set by the scheduler: when the request expires in the queue; 0 for never.
        self.deadline_ns = 0
        #: The responses that the caller has not read, if the model queue counts them.
        self.unread = 0
        #: Set by the model queue for a request whose place in the batch matters: it stays in the batch if it is
        #: cancelled, and is not retried alone if the batch fails. Always True for `Padding`.
        self.pinned = False

    #: Nanoseconds spent on concatenating the inputs of the batch, on inference, and on splitting its outputs. Set only
    #: for a model that other models call, when it answers, and by schedulers that answer requests themselves.
    spans_ns: tuple[int, int, int]
    #: Set by a sender inside of the server, for models with ``takes_device_tensors`` only: outputs that it
    #: takes as `DeviceTensor`s; True if also in the memory of the host, where `DeviceTensor.to_host` then finds it.
    on_device: Mapping[str, bool]
    #: Set by `TimeKeeper`: a `BatchTimes`.
    times: tuple[int, int, int, int]

    def watch(self, watcher: Watcher) -> None:
        """Add ``watcher`` to those that each answer passes before its caller gets it. Event loop only.

        The last one added is nearest to the model: it gets an answer first. One that raises is logged and skipped.
        """
        if self.watchers is None:
            self.watchers = []
        self.watchers.append(watcher)

    def cancel(self) -> None:
        """Cancel the request: its caller has disconnected. Event loop only. May be called at any time, repeatedly."""
        if not self.abandoned:
            self.cancelled = self.abandoned = True
            if self.on_cancel is not None:
                self.on_cancel(self)

    def stop(self) -> None:
        """Note that the caller wants no further responses, but accepts those under way. Event loop only."""
        if not self.cancelled:
            self.cancelled = True
            if self.on_cancel is not None:
                self.on_cancel(self)

    def read(self) -> None:
        """Note that the caller has read one response that was not the last. Event loop only.

        Required after each such response to a decoupled request: with `UNREAD` responses unread, its model waits.
        """
        self.unread -= 1
        if self.on_read is not None:
            self.on_read(self)

    def begin(self) -> InferRequest:
        """Return the request for an instance that executes it, which may read `InferRequest.cancelled`. Call `end`
        afterwards."""
        request = self.request
        request._execution = self
        return request

    def end(self) -> None:
        """Note that the execution has ended: the instance sends no further answer."""
        self.request._execution = self.cancelled


def ticket_of(request: InferRequest, respond: Respond) -> Ticket:
    """Return a ticket of a request that may be a `LocatedRequest`: its inputs are released with the last answer."""
    ticket = Ticket(request, respond)
    if isinstance(request, LocatedRequest):
        if request.release is not None:
            ticket.watch(request.release)
        if request.on_device is not None:
            ticket.on_device = request.on_device
    return ticket


class Padding(Ticket):
    """Rows that fill up a batch, without a caller: no answer, no statistics. ``inputs`` are in the model's shapes."""

    __slots__ = ()

    def __init__(self, model_name: str, inputs: Mapping[str, Tensor], rows: int = 1) -> None:
        super().__init__(InferRequest(model_name, inputs), _discard)
        self.rows, self.pinned = rows, True


class ReasonedBatch(list[Ticket]):
    """The tickets of a batch, the reason why it runs now, and its rows, 0 if not counted. The code that makes one sets
    both attributes: a constructor would cost as much as everything else that recording a batch does."""

    __slots__ = ("reason", "rows")

    reason: str
    rows: int


class Batch(ReasonedBatch):
    """A batch that a scheduler gives to an instance, if a list of tickets is not enough.

    ``added``: the further inputs of each request, in the order of the tickets. ``pinned``: the batch runs unchanged if
    requests are cancelled, and its requests are not retried one by one if it fails. It may contain `Padding`.
    ``reason``: why it runs now, in one or two words, for ``headrace explain``. ``rows``: the rows of all tickets
    together, 0 if not counted.
    """

    __slots__ = ("added", "pinned")

    def __init__(
        self,
        tickets: Iterable[Ticket],
        added: Sequence[Mapping[str, Tensor]] = (),
        pinned: bool = False,
        reason: str = "",
        rows: int = 0,
    ) -> None:
        super().__init__(tickets)
        self.added, self.pinned, self.reason, self.rows = added, pinned, reason, rows


def _discard(answer: Answer, final: bool) -> None:
    """Discard an answer."""
