"""Requests from the side that is asked: handed on, answered, and told what their callers want."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from headrace.ipc.codec import Decoder, Encoder, ReceivedRequest, reply_of, unsendable_reply
from headrace.ipc.framing import Frame, Kind, ProtocolError, read_integers
from headrace.ipc.tensors import INLINE
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket

#: Any thread: sends the reply to a call. False if the event loop has to.
AtOnce: TypeAlias = Callable[[int, InferResponse], bool]

#: What a peer may have going at the same time; one that asks for more has lost count.
_MOST_REQUESTS = 65536


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
        for ticket in self._open.values():
            self._cancel(ticket)
        self._open.clear()

    def _ticket(self, request: ReceivedRequest, send: Callable[[bytes], None], at_once: AtOnce | None) -> Ticket:
        call = request.call
        if call in self._open or len(self._open) >= _MOST_REQUESTS:
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
