"""Requests between two processes: numbered, answered, cancelled and read.

`OutgoingRequests` are those of the side that asks, and `IncomingRequests` those of the side that is asked. Beside
them stands a shorter way for one small request at a time, whose answer the asking thread reads itself:
`DirectCalls` and `DirectReplies`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from headrace.ipc.channel import FramedSocket
from headrace.ipc.codec import Decoder, Encoder, ReceivedRequest
from headrace.ipc.framing import Frame, Kind, ProtocolError, integers_frame, read_integers
from headrace.ipc.replies import Reply, reply_of, unsendable_reply, unsendable_request
from headrace.ipc.tensors import INLINE
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket

#: Any thread: sends the reply to a call. False if the event loop has to.
AtOnce: TypeAlias = Callable[[int, InferResponse], bool]

#: What a peer may have going at the same time; one that asks for more has lost count.
MOST_INCOMING = 65536


# ---------------------------------------------------------------------- the side that asks


class OutgoingRequests:
    """Requests that the peer is to answer, by the number of their call.

    ``send`` takes frames that say what has become of them: `Ticket.cancel`, ``stop`` and ``read`` tell
    the peer by it. All on the threads that call.
    """

    def __init__(self, decoder: Decoder, send: Callable[[bytes], None]) -> None:
        self.in_flight: dict[int, Ticket] = {}
        self.numbers = itertools.count(1)
        self._decoder, self._send = decoder, send

    def numbered(self, tickets: Sequence[Ticket]) -> list[tuple[int, Ticket]]:
        """``tickets``, each with the number of its call."""
        numbers = self.numbers
        return [(next(numbers), ticket) for ticket in tickets]

    def enter(self, numbered: Sequence[tuple[int, Ticket]]) -> None:
        """Expect answers to ``numbered``. Before they are sent, or in the same turn of an event loop."""
        in_flight, tell = self.in_flight, self._tell_cancelled
        for call, ticket in numbered:
            in_flight[call] = ticket
            ticket.on_cancel = partial(tell, call)

    def hear(self, message: Frame) -> None:
        """Take ANSWERS. Raises `ProtocolError`."""
        for reply in self._decoder.answers(message):
            self.take(reply)

    def take(self, reply: Reply) -> None:
        """Give an answer to whoever waits for it. Raises `ProtocolError` if nobody does."""
        call = reply.call
        ticket = self.in_flight.get(call)
        if ticket is None:
            raise ProtocolError(f"an answer to request {call}, which is not in flight")
        if reply.final:
            del self.in_flight[call]
        elif ticket.on_read is None:
            ticket.on_read = partial(self._has_read, call)
        self._deliver(ticket, reply.answer, reply.final)

    def _deliver(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        ticket.respond(answer, final)

    def _tell_cancelled(self, call: int, ticket: Ticket) -> None:
        if call in self.in_flight:
            self._send(integers_frame(Kind.CANCEL if ticket.abandoned else Kind.STOP, (call,)))

    def _has_read(self, call: int, ticket: Ticket) -> None:
        self._send(integers_frame(Kind.READ, (call,)))


class LoopOutgoingRequests(OutgoingRequests):
    """`OutgoingRequests` of an event loop, which tells in one message what is read in one turn."""

    def __init__(self, decoder: Decoder, send: Callable[[bytes], None]) -> None:
        super().__init__(decoder, send)
        self._loop = asyncio.get_running_loop()
        self._read: list[int] = []

    def _has_read(self, call: int, ticket: Ticket) -> None:
        if not self._read:
            self._loop.call_soon(self._tell_reads)
        self._read.append(call)

    def _tell_reads(self) -> None:
        calls, self._read = self._read, []
        self._send(integers_frame(Kind.READ, calls))


# ---------------------------------------------------------------------- the side that is asked


def tell(
    message: Frame,
    tickets: Mapping[int, Ticket],
    cancel: Callable[[Ticket], None] = Ticket.cancel,
) -> bool:
    """Tell those of ``tickets`` what ``message`` says of them; False if it says nothing of requests."""
    if message.kind == Kind.CANCEL:
        change: Callable[[Any], None] = cancel
    elif message.kind == Kind.STOP:
        change = Ticket.stop
    elif message.kind == Kind.READ:
        change = Ticket.read
    else:
        return False
    for ticket in _found(tickets, message):
        change(ticket)
    return True


def _found(tickets: Mapping[int, Ticket], message: Frame) -> Iterator[Ticket]:
    """Those that ``message`` mentions and that have no last answer yet."""
    return filter(None, map(tickets.get, read_integers(message)))


class IncomingRequests:
    """The requests of one peer, by call, until their last answer has been sent. Event loop only.

    ``submit`` is given the ticket of each, and answers it by ``respond``; ``cancel`` says that nobody waits any more.
    ``callers`` are the tickets of the requests in whose execution the peer may ask, by call.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        submit: Callable[[Ticket], None],
        cancel: Callable[[Ticket], None],
        callers: Mapping[int, Ticket],
    ) -> None:
        self._encoder, self._decoder = encoder, decoder
        self._submit, self._cancel, self._callers = submit, cancel, callers
        self._open: dict[int, Ticket] = {}
        self._is_closed = False

    def hear(self, message: Frame, send: Callable[[bytes], None], at_once: AtOnce | None = None) -> bool:
        """Take what ``message`` says of requests, old or new; False if it says something else.

        Answers to new ones go to ``send``, unless ``at_once`` has taken them before. Raises `ProtocolError`.
        """
        if message.kind != Kind.REQUESTS:
            return tell(message, self._open, self._cancel)
        requests = self._decoder.requests(message, self._callers)
        for ticket in [self._ticket(request, send, at_once) for request in requests]:
            self._submit(ticket)
        return True

    def close(self) -> None:
        """The peer is gone: nothing is sent any more, and nobody waits for what it has asked."""
        self._is_closed = True
        for ticket in tuple(self._open.values()):  # what waited is answered at once, and leaves
            self._cancel(ticket)
        self._open.clear()

    def _ticket(self, request: ReceivedRequest, send: Callable[[bytes], None], at_once: AtOnce | None) -> Ticket:
        call = request.call
        if call in self._open or len(self._open) >= MOST_INCOMING:
            raise ProtocolError(f"request {call} is one too many")
        has_replied = False

        def reply(answer: Answer, final: bool) -> None:
            if final:
                self._open.pop(call, None)
            if not has_replied and not self._is_closed:
                self._reply(send, call, answer, final)

        self._open[call] = ticket = Ticket(request, reply)
        if at_once is not None:

            def reply_at_once(response: InferResponse) -> None:
                nonlocal has_replied
                has_replied = at_once(call, response)

            ticket.respond_at_once = reply_at_once
        return ticket

    def _reply(self, send: Callable[[bytes], None], call: int, answer: Answer, final: bool) -> None:
        reply = reply_of(call, answer, final)
        try:
            message = self._encoder.answers([reply])
        except ValueError as error:
            message = self._encoder.answers([unsendable_reply(reply, error)])
        send(message)


# ---------------------------------------------------------------------- the short way


class DirectCalls:
    """The short way: the thread that asks over ``channel`` reads the answer itself.

    Elsewhere a thread reads all answers and wakes whoever waits; that switch costs more than the rest of a
    small call. One request at a time; large tensors take the other way, through the arena.
    """

    def __init__(self, channel: FramedSocket, decoder: Decoder) -> None:
        self._channel, self._decoder = channel, decoder
        self._frames = channel.frames()
        self._encoder = Encoder(None)
        self._turn = threading.Lock()

    def take_turn(self, request: InferRequest) -> bool:
        """Whether ``request`` may go this way now; then `ask` must follow."""
        is_small = all(tensor.nbytes < INLINE for tensor in request.inputs.values())  # type: ignore[union-attr]
        return is_small and self._turn.acquire(blocking=False)

    def ask(self, call: int, request: InferRequest) -> Answer:
        """The last answer that said something; gives the turn back."""
        try:
            message = self._encoder.request(call, request)
        except ValueError as error:
            self._turn.release()
            return unsendable_request(error)
        self._channel.send(message)
        answer = self._answer()
        # Not in a finally: a thread that an exception (of a signal's handler) takes away from here leaves
        # an answer behind, which nobody may take for another's. All go the other way then.
        self._turn.release()
        return answer

    def _answer(self) -> Answer:
        said: Answer = None
        while True:
            for reply in self._decoder.answers(next(self._frames)):
                said = reply.answer or said
                if reply.final:
                    return said


class DirectReplies:
    """Writes answers: on the event loop to ``transport``, or at once, on the thread that has one, to ``end``.

    ``end`` is the same socket, but its descriptor, which does not block, is ours to close.
    The loop would have to be woken for it first, which costs as much as the asker's own waking.
    """

    def __init__(self, transport: asyncio.WriteTransport, end: socket.socket) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._encoder = Encoder(None)
        self._end = end
        self._turn = threading.Lock()  # while nothing is done that could run a finalizer: the loop waits for it, too

    def send(self, message: bytes) -> None:
        """Event loop only."""
        self._transport.write(message)

    def send_at_once(self, call: int, response: InferResponse) -> bool:
        """Any thread. False if the loop has to do it: the response is large, or cannot be sent as it is."""
        if any(tensor.nbytes >= INLINE for tensor in response.outputs.values()):
            return False
        try:
            message = self._encoder.answers([reply_of(call, response, True)])
            with self._turn:
                sent = self._end.send(message)
        except (ValueError, OSError):  # OSError: the peer does not read, or has gone
            return False
        if sent < len(message):
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the peer with it
                self._loop.call_soon_threadsafe(self.send, message[sent:])
        return True

    def close(self) -> None:
        """Nothing is sent any more."""
        with self._turn:
            self._end.close()
        self._transport.abort()
