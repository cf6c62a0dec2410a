"""The requests of one frontend process in the process of the engine, and their answers. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from headrace.errors import HeadraceError, InternalError
from headrace.ipc.codec import Decoder, Encoder, ReceivedRequest
from headrace.ipc.framing import Frame, Kind, ProtocolError
from headrace.ipc.layouts import MOST_ALIKE, AlikeRequests, Layout, LayoutReader, LayoutWriter
from headrace.ipc.peer_requests import MOST_INCOMING, AtOnce, IncomingRequests
from headrace.ipc.replies import Reply, reply_of, unsendable_reply
from headrace.large import LARGE_BYTES
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket
from headrace.telemetry.pacing import paced

if TYPE_CHECKING:
    from headrace.engine import Engine, ModelView

log = paced(__name__)


class _Passed(NamedTuple):
    """What `Signature.check` has said of a request of some layout: it says the same of all, since it looks at nothing
    else of them. It holds as long as the ``view`` is served."""

    view: ModelView
    rows: int
    batch_key: object


class _Answered(NamedTuple):
    """An answer that is to be sent."""

    call: int
    answer: Answer
    final: bool


class IncomingInferences(IncomingRequests):
    """The requests of a frontend process, and their answers: those of one turn of the loop in one message."""

    def __init__(self, encoder: Encoder, decoder: Decoder, engine: Engine, send: Callable[[bytes], None]) -> None:
        super().__init__(encoder, decoder, self._start, Ticket.cancel, {})
        self._entrance = engine.entrance()
        self._large = engine.large_work
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._answers: list[_Answered] = []
        self._layouts, self._heard = LayoutWriter(), LayoutReader()
        #: By the number of the layout.
        self._passed: dict[int, _Passed] = {}
        #: Calls below it have been made.
        self._next_call = 1

    def hear(self, message: Frame, send: Callable[[bytes], None], at_once: AtOnce | None = None) -> bool:
        """Take what ``message`` says of requests, old or new; False if it says something else.

        Raises `ProtocolError`.
        """
        if message.kind == Kind.ALIKE_REQUESTS:
            self._start_alike(self._heard.requests(message))
            return True
        if message.kind == Kind.LAYOUT:
            self._passed.pop(self._heard.hear(message), None)
            return True
        return super().hear(message, send, at_once)

    # ------------------------------------------------------------------ in

    def _ticket(self, request: ReceivedRequest, send: Callable[[bytes], None], at_once: AtOnce | None) -> Ticket:
        call = request.call
        self._expect(call, 1)
        self._open[call] = ticket = Ticket(request, partial(self._answered, call))
        return ticket

    def _expect(self, first_call: int, count: int) -> None:
        """Count ``count`` new calls. Raises `ProtocolError` if they are not new, or too many."""
        if first_call < self._next_call or len(self._open) + count > MOST_INCOMING:
            raise ProtocolError(f"{count} requests from {first_call} on are too many")
        self._next_call = first_call + count

    def _start(self, ticket: Ticket) -> None:
        """Have ``ticket`` answered by whatever serves now; a refusal is an answer."""
        try:
            for tensor in ticket.request.inputs.values():
                if type(tensor) is BytesTensor and tensor.nbytes > LARGE_BYTES:
                    self._large.begin(partial(_find_strings, ticket), partial(self._start_found, ticket))
                    return
            self._entrance.submit(ticket)
        except HeadraceError as error:
            _refuse(ticket, error)
        except Exception as error:
            self._failed(ticket, error)

    def _start_found(self, ticket: Ticket, outcome: Exception | None) -> None:
        try:
            self._entrance.submit(ticket)
        except HeadraceError as error:
            _refuse(ticket, error)

    def _start_alike(self, requests: AlikeRequests) -> None:
        """`_start` for all of ``requests``, of which one is checked, and that once."""
        layout, first_call, ids, inputs = requests
        self._expect(first_call, len(inputs))
        model, version, outputs, answered = layout.model_name, layout.model_version, layout.outputs, self._answered
        tickets = [
            Ticket(InferRequest(model, tensors, outputs, known_as, version), partial(answered, call))
            for call, (tensors, known_as) in enumerate(zip(inputs, ids or [""] * len(inputs), strict=True), first_call)
        ]
        self._open.update(enumerate(tickets, first_call))
        try:
            view = self._entrance.find(model, version)
        except HeadraceError as error:
            for ticket in tickets:
                _refuse(ticket, error)
            return
        passed = self._passed.get(layout.number)
        if passed is None or passed.view is not view:
            passed = self._pass(layout, view, tickets)
            if passed is None:
                return
        _, rows, batch_key = passed
        enqueue = view.enqueue
        for ticket in tickets:
            ticket.rows, ticket.batch_key = rows, batch_key
            try:
                enqueue(ticket)
            except HeadraceError as error:
                _refuse(ticket, error)
            except Exception as error:
                self._failed(ticket, error)

    def _pass(self, layout: Layout, view: ModelView, tickets: Sequence[Ticket]) -> _Passed | None:
        """What the check of the first of ``tickets`` has said; None if each had to be started by itself: there is
        something wrong with it, or more to be done for it than to check it."""
        ticket = tickets[0]
        request = ticket.request
        try:
            view.check(ticket)
        except HeadraceError:  # each is told by its id
            is_plain = False
        else:
            is_plain = ticket.request is request
        if is_plain:
            self._passed[layout.number] = passed = _Passed(view, ticket.rows, ticket.batch_key)
            return passed
        ticket.request = request
        for each in tickets:
            self._start(each)
        return None

    def _failed(self, ticket: Ticket, error: Exception) -> None:
        log.error("a request to model '%s' failed", ticket.request.model_name, exc_info=error)
        ticket.respond(InternalError("the request failed inside the server; its log has the reason"), True)

    # ------------------------------------------------------------------ out

    def _answered(self, call: int, answer: Answer, final: bool) -> None:
        if final:
            self._open.pop(call, None)
        answers = self._answers
        if not answers:
            self._loop.call_soon(self._flush)
        answers.append(_Answered(call, answer, final))

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        if self._is_closed:
            return
        for layout, some in groupby(answers, self._layout_of):
            run = list(some)
            if layout is None:
                self._send_others([reply_of(*each) for each in run])
                continue
            for begin in range(0, len(run), MOST_ALIKE):
                part = run[begin : begin + MOST_ALIKE]
                outputs = [each.answer.outputs for each in part]  # type: ignore[union-attr]
                self._send(self._layouts.answers(layout, [each.call for each in part], outputs))

    def _layout_of(self, answered: _Answered) -> Layout | None:
        return self._layouts.layout_of(answered.answer) if answered.final else None

    def _send_others(self, replies: list[Reply]) -> None:
        try:
            self._send(self._encoder.answers(replies))
        except ValueError as error:
            self._send_apart(replies, error)

    def _send_apart(self, replies: list[Reply], error: ValueError) -> None:
        """Send those of ``replies`` that can travel, since together they cannot."""
        for reply in replies:
            try:
                message = self._encoder.answers([reply])
            except ValueError as reason:
                message = self._encoder.answers([unsendable_reply(reply, reason)])
            self._send(message)


def _refuse(ticket: Ticket, error: HeadraceError) -> None:
    error.is_refusal = True
    ticket.respond(error.with_traceback(None), True)


def _find_strings(ticket: Ticket) -> None:
    """Find the strings of large inputs here, and not on the event loop, which is to check them."""
    for tensor in ticket.request.inputs.values():
        if type(tensor) is BytesTensor:
            with contextlib.suppress(HeadraceError):  # refused by the check, in words of its own
                tensor.offsets  # noqa: B018
