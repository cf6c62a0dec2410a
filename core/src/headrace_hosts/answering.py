"""One request and its one response, over any protocol: threads read and print what is large; errors are worded here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace.errors import HeadraceError, InternalError
from headrace.frontends.failures import log_fault
from headrace.messages.request import InferRequest, log_id
from headrace.messages.response import InferResponse
from headrace.messages.single import SingleAnswer
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket, ticket_of
from headrace.off_loop import LARGE_BYTES, UNBOUNDED, OffLoopWork, TooLargeForLoop, worded
from headrace.telemetry.log_limits import rate_limited_logger

if TYPE_CHECKING:
    from headrace.engine import Caller, ModelView, RequestSubmitter

log = rate_limited_logger(__name__)

#: The type that the transport sends.
R = TypeVar("R")


class ResponseWriter(SingleAnswer, Generic[R]):
    """Encode the last response of one request and pass it to ``reply``. Event loop only."""

    __slots__ = ("_large", "_reply", "view")

    def __init__(self, view: ModelView, reply: Callable[[R], None], large: OffLoopWork) -> None:
        self._answer, self._count = None, 0  # what the base does, without the call
        self.view, self._reply, self._large = view, reply, large

    @abstractmethod
    def encode(self, response: InferResponse, loop_limit_bytes: int) -> R:
        """Return ``response`` encoded. Any thread.

        Raises `HeadraceError`, and `TooLargeForLoop` beyond ``loop_limit_bytes``.
        """

    @abstractmethod
    def refused(self, error: HeadraceError) -> R:
        """Return ``error`` encoded."""

    def settle(self, answer: InferResponse | HeadraceError) -> None:
        if isinstance(answer, HeadraceError):
            log_fault(answer, "Infer", self.view.name, str(self.view.version))
            self._reply(self.refused(answer))
            return
        try:
            reply = self.encode(answer, LARGE_BYTES)
        except TooLargeForLoop:
            self._settle_large(answer)
            return
        except Exception as error:
            reply = self._unencodable(error)
        self._reply(reply)

    def read_large(
        self, read: Callable[[], InferRequest], submitter: RequestSubmitter, caller: Caller | None, known_as: str = ""
    ) -> Callable[[], None]:
        """Let a thread ``read`` the request, then submit it as from ``caller``. Return a function that cancels it.

        Raises `Unavailable` if too much work waits, with ``known_as`` (the `log_id` of the request, if known) before
        the text.
        """
        submitted: list[Ticket] = []

        def submit(outcome: InferRequest | Exception) -> None:
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                ticket = ticket_of(outcome, self)
                self.view = submitter.submit(ticket, caller)
                submitted.append(ticket)
            except Exception as error:
                self.settle(worded(error))
            finally:
                del outcome  # an error and the frame that holds it would keep each other, and the body

        leave = self._large.begin(read, submit, known_as)

        def cancel() -> None:
            leave()
            for ticket in submitted:
                ticket.cancel()

        return cancel

    def _settle_large(self, response: InferResponse) -> None:
        def finish(outcome: R | Exception) -> None:
            self._reply(self.refused(worded(outcome)) if isinstance(outcome, Exception) else outcome)

        try:
            size = sum([tensor.nbytes for tensor in response.outputs.values()])
            self._large.begin(partial(self._encode_large, response), finish, log_id(response.id), size)
        except HeadraceError as error:  # too many wait
            finish(error)

    def _encode_large(self, response: InferResponse) -> R:
        try:
            return self.encode(response, UNBOUNDED)
        except Exception as error:
            return self._unencodable(error)

    def _unencodable(self, error: Exception) -> R:
        if isinstance(error, HeadraceError):
            return self.refused(error.with_traceback(None))  # without its frames, which hold the response
        if isinstance(error, MemoryError):
            return self.refused(worded(error))
        log.error("the response of model '%s' could not be encoded", self.view.name, exc_info=error)
        return self.refused(InternalError(f"the response of model '{self.view.name}' could not be encoded"))


def check_strings(view: ModelView, request: InferRequest) -> None:
    """Scan the strings of every BYTES input now. `BytesTensor.is_complete` keeps the offsets, so the event loop does
    not scan.

    Raises `InvalidArgument`, as the model would, if their number differs from the shape.
    """
    for tensor in request.inputs.values():
        if isinstance(tensor, BytesTensor) and not tensor.is_complete:
            raise view.explain(request)
