"""One submitted request, until its last answer: who is answered, when it came, and whether somebody still waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, TypeAlias

from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.tensor import Tensor

if TYPE_CHECKING:
    from headrace.messages.response import InferResponse

#: Responses that the caller of a decoupled request may have unread before its model must wait.
UNREAD = 64

#: Called on the event loop with each answer; the second argument is true exactly once, last.
#: ``None`` with true ends a decoupled request that has nothing more to say.
Respond: TypeAlias = Callable[[Answer, bool], None]

#: Called with a ticket, each answer to it, and whether that is the last. Returns the answer that goes on to the caller.
Watcher: TypeAlias = "Callable[[Ticket, Answer, bool], Answer]"


class Ticket:
    """What the server knows of one submitted request. Compared and hashed by identity.

    The sender makes the ticket and submits it, and may call `cancel`, `stop` and `read`. Everything else is the
    scheduler's from then on. What removes the ticket from the queue owns it and answers it, on the event loop. Each
    answer passes ``watchers`` (`watch`) on its way to ``respond``, which never changes. ``request`` is replaced if the
    model is asked something else than its caller asked: inputs that are reshaped or added, outputs that are kept back.
    """

    __slots__ = (
        "abandoned", "arrival_ns", "batch_key", "cancelled", "deadline_ns", "on_cancel", "on_read", "pinned",
        "queued_ns", "request", "respond", "respond_at_once", "rows", "spans_ns", "started_ns", "unread", "watchers",
    )  # fmt: skip

    def __init__(self, request: InferRequest, respond: Respond) -> None:
        self.request = request
        self.respond: Final = respond
        #: See `watch`. None for most requests.
        self.watchers: list[Watcher] | None = None
        #: Set by a sender who waits on a thread for one response: it is given it on the thread that made it,
        #: before the event loop hears of it and calls ``respond`` as ever. May not be called at all.
        self.respond_at_once: Callable[[InferResponse], None] | None = None
        self.arrival_ns = monotonic_ns()
        #: Set by ``Signature.check``: rows along the batch axis (1 for a model without one), and what
        #: must be equal among the requests of a batch (None when nothing can differ).
        self.rows = 1
        self.batch_key: object = None
        #: Set by the scheduler when it accepts the request.
        self.queued_ns = 0
        #: Set by a worker whose answer may come after its execution: when that began.
        self.started_ns = 0
        #: True once the caller has gone, or wants no more; read by long executions. Set by `cancel` and `stop`.
        self.cancelled = False
        #: True once nobody takes what is answered. Set by `cancel` only.
        self.abandoned = False
        #: Set by whoever has the ticket: takes it out of the queue, or tells its execution.
        self.on_cancel: Callable[[Ticket], None] | None = None
        #: Set by the worker: lets an execution go on that waits for its caller to read.
        self.on_read: Callable[[Ticket], None] | None = None
        #: Set by the scheduler if the time of the request to wait may be over: when, 0 for never.
        self.deadline_ns = 0
        #: Responses that were given to the caller and that he has not taken, where the kernel counts them.
        self.unread = 0
        #: Set by the kernel for a request that runs where it stands in its batch: not left out once it is
        #: cancelled, and not run again alone when its batch has failed. `Padding` always is.
        self.pinned = False

    #: Nanoseconds that putting the batch together, inferring, and taking it apart took. Not set for most: it is where
    #: the model is asked by others, when it answers, and where a scheduler that answers itself has added up what others
    #: took.
    spans_ns: tuple[int, int, int]

    def watch(self, watcher: Watcher) -> None:
        """Add ``watcher`` to those that each answer passes before its caller gets it. Event loop only.

        The last one added is nearest to the model: it gets an answer first. One that raises is logged and passed by.
        """
        if self.watchers is None:
            self.watchers = []
        self.watchers.append(watcher)

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
        self.unread -= 1
        if self.on_read is not None:
            self.on_read(self)

    def begin(self) -> InferRequest:
        """The request, for an instance that executes it and may ask whether it is cancelled. `end` must follow."""
        request = self.request
        request._execution = self
        return request

    def end(self) -> None:
        """The instance has said its last to the request."""
        self.request._execution = self.cancelled


class Padding(Ticket):
    """Nobody's request: rows that fill a batch up. No answer, no statistics. ``inputs`` are as the model takes them."""

    __slots__ = ()

    def __init__(self, model_name: str, inputs: Mapping[str, Tensor], rows: int = 1) -> None:
        super().__init__(InferRequest(model_name, inputs), _unheard)
        self.rows, self.pinned = rows, True


class ReasonedBatch(list[Ticket]):
    """Tickets, why they run now, and how many rows they are together (0 if nobody has counted). Made without `Batch`'s
    constructor, which would cost as much as all the rest of remembering a batch: who makes one sets both."""

    __slots__ = ("reason", "rows")

    reason: str
    rows: int


class Batch(ReasonedBatch):
    """What a scheduler has an instance run, where a list of tickets does not say it all.

    ``added``: what each request gets as further inputs, in the order of the tickets. ``pinned``: the batch runs as it
    is, whoever leaves meanwhile, and its requests are not tried one by one if it fails. It may hold `Padding`.
    ``reason``: why it runs now, in a word or two, for whoever asks the server to explain; ``rows``: how many they are
    together, if that is known, 0 if not.
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


def _unheard(answer: Answer, final: bool) -> None:
    """Nobody asked."""
