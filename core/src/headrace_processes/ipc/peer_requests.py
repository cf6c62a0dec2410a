"""Requests in flight between two processes: their numbers, answers and cancellation.

The side that sends requests has `OutgoingRequests`, the side that serves them `IncomingRequests`. `FastPathCalls` and
`FastPathReplies` are a fast path for one small request at a time: the calling thread reads the answer itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace_processes.ipc.channel import FramedSocket
from headrace_processes.ipc.codec import Decoder, Encoder, ReceivedRequest
from headrace_processes.ipc.framing import Frame, Kind, ProtocolError, integers_frame, read_integers
from headrace_processes.ipc.replies import Reply, reply_of, unsendable_reply, unsendable_request
from headrace_processes.ipc.tensors import INLINE

#: Sends the response to a call from any thread. Returns False if the event loop has to send it.
AtOnce: TypeAlias = Callable[[int, InferResponse], bool]

#: A change that a peer makes to a request that it has sent: cancel, stop or read.
Change: TypeAlias = Callable[[Ticket], None]
#: The most requests in flight of one peer. More are a protocol error.
MAX_INCOMING = 65536
#: The reads of a request that are sent together. A peer with 64 unread responses waits until 32 are read. This number
#: divides both, so the peer never waits for reads that are held back.
READS = 16


# ---------------------------------------------------------------------- the side that sends requests


class OutgoingRequests:
    """The requests in flight that the peer answers, by number.

    ``send`` writes a frame: `Ticket.cancel`, ``stop`` and ``read`` use it to notify the peer, on the thread that calls
    them.
    """

    def __init__(self, decoder: Decoder, send: Callable[[bytes], None]) -> None:
        self.in_flight: dict[int, Ticket] = {}
        self.numbers = itertools.count(1)
        self._decoder, self._send = decoder, send

    def numbered(self, tickets: Sequence[Ticket]) -> list[tuple[int, Ticket]]:
        """Return ``tickets``, each with a new number for its call."""
        numbers = self.numbers
        return [(next(numbers), ticket) for ticket in tickets]

    def enter(self, numbered: Sequence[tuple[int, Ticket]]) -> None:
        """Register ``numbered`` as in flight. Call it before they are sent, or in the same turn of the event loop."""
        in_flight, send_cancelled = self.in_flight, self._send_cancelled
        for call, ticket in numbered:
            in_flight[call] = ticket
            ticket.on_cancel = partial(send_cancelled, call)

    def receive(self, message: Frame) -> None:
        """Handle an ANSWERS. Raises `ProtocolError`."""
        for reply in self._decoder.answers(message):
            self.answer(reply)

    def answer(self, reply: Reply) -> None:
        """Deliver an answer to its request. Raises `ProtocolError` if the request is not in flight."""
        call = reply.call
        ticket = self.in_flight.get(call)
        if ticket is None:
            raise ProtocolError(f"an answer to request {call}, which is not in flight")
        if reply.final:
            del self.in_flight[call]
        elif ticket.on_read is None:
            ticket.on_read = self._on_read(call)
        self._deliver(ticket, reply.answer, reply.final)

    def _deliver(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        ticket.respond(answer, final)

    def _send_cancelled(self, call: int, ticket: Ticket) -> None:
        if call in self.in_flight:
            self._send(integers_frame(Kind.CANCEL if ticket.abandoned else Kind.STOP, (call,)))

    def _on_read(self, call: int) -> Callable[[Ticket], None]:
        """Return the function that notifies the peer of each read."""
        return partial(self._send_read, call)

    def _send_read(self, call: int, ticket: Ticket) -> None:
        self._send(integers_frame(Kind.READ, (call,)))


class LoopOutgoingRequests(OutgoingRequests):
    """`OutgoingRequests` on an event loop: a request sends `READS` of its reads together.

    One message per read would wake the child for each token of a stream.
    """

    def __init__(self, decoder: Decoder, send: Callable[[bytes], None]) -> None:
        super().__init__(decoder, send)
        self._loop = asyncio.get_running_loop()
        self._read: list[int] = []

    def _on_read(self, call: int) -> Callable[[Ticket], None]:
        unsent = 0

        def read(ticket: Ticket) -> None:
            nonlocal unsent
            unsent += 1
            if unsent == READS:
                unsent = 0
                self._send_soon(call)

        return read

    def _send_soon(self, call: int) -> None:
        if not self._read:
            self._loop.call_soon(self._send_reads)
        self._read += [call] * READS

    def _send_reads(self) -> None:
        calls, self._read = self._read, []
        self._send(integers_frame(Kind.READ, calls))


# ---------------------------------------------------------------------- the side that serves requests


def change_of(message: Frame, cancel: Change = Ticket.cancel) -> Change | None:
    """Return the change that a CANCEL, STOP or READ makes to the tickets that it names; None for any other kind."""
    changes: Mapping[int, Change] = {Kind.CANCEL: cancel, Kind.STOP: Ticket.stop, Kind.READ: Ticket.read}
    return changes.get(message.kind)


class IncomingRequests:
    """The requests of one peer, by number, until their final answer is sent. Event loop only.

    ``submit`` is called with the ticket of each new request, which is answered by ``respond``. ``cancel`` is called
    with the ticket of a request that the peer cancels. ``callers`` are the requests, by number, whose execution may
    send requests.
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

    def receive(self, message: Frame, send: Callable[[bytes], None], at_once: AtOnce | None = None) -> bool:
        """Handle REQUESTS, CANCEL, STOP and READ. Return False for any other kind. Raises `ProtocolError`.

        Answers to new requests are written with ``send``, unless ``at_once`` has already sent them.
        """
        if message.kind != Kind.REQUESTS:
            change = change_of(message, self._cancel)
            if change is None:
                return False
            for call in read_integers(message):
                if (ticket := self._open.get(call)) is not None:
                    change(ticket)
            return True
        requests = self._decoder.requests(message, self._callers)
        for ticket in [self._ticket(request, send, at_once) for request in requests]:
            self._submit(ticket)
        return True

    def close(self) -> None:
        """Cancel all requests and send nothing more: the peer has disconnected."""
        self._is_closed = True
        for ticket in tuple(self._open.values()):  # a copy: a queued request is answered at once, and removed
            self._cancel(ticket)
        self._open.clear()

    def _ticket(self, request: ReceivedRequest, send: Callable[[bytes], None], at_once: AtOnce | None) -> Ticket:
        call = request.call
        if call in self._open or len(self._open) >= MAX_INCOMING:
            raise ProtocolError(f"request {call}: the number is in use, or {MAX_INCOMING} requests are in flight")
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


# ---------------------------------------------------------------------- the fast path


class FastPathCalls:
    """Sends one small request at a time over ``channel``; the calling thread reads the answer itself.

    Other answers are read by one thread, which wakes the threads that wait. That thread switch costs more than the rest
    of a small call. Large tensors need the arena, and do not use the fast path.
    """

    def __init__(self, channel: FramedSocket, decoder: Decoder) -> None:
        self._channel, self._decoder = channel, decoder
        self._frames = channel.frames()
        self._encoder = Encoder(None)
        self._lock = threading.Lock()

    def try_acquire(self, request: InferRequest) -> bool:
        """Reserve the fast path for ``request`` if it is free and the request is small. If True, call `ask` next."""
        is_small = all(tensor.nbytes < INLINE for tensor in request.inputs.values())  # type: ignore[union-attr]
        return is_small and self._lock.acquire(blocking=False)

    def ask(self, call: int, request: InferRequest) -> Answer:
        """Send ``request``, wait for its answer, and release the fast path. Return the last answer that was not
        empty."""
        try:
            message = self._encoder.request(call, request)
        except ValueError as error:
            self._lock.release()
            return unsendable_request(error)
        self._channel.send(message)
        answer = self._answer()
        # Not in a finally: if a signal handler raises before this line, an unread answer remains on the channel, which
        # the next caller must not read. The lock stays held, so no request uses the fast path again.
        self._lock.release()
        return answer

    def _answer(self) -> Answer:
        answer: Answer = None
        while True:
            for reply in self._decoder.answers(next(self._frames)):
                answer = reply.answer or answer
                if reply.final:
                    return answer


class FastPathReplies:
    """Writes answers: on the event loop to ``transport``, or directly to ``end`` on the thread that has the answer.

    ``end`` is a second, non-blocking descriptor of the same socket, which this object closes. A write to it does not
    wake the event loop; that wake-up costs as much as that of the caller.
    """

    def __init__(self, transport: asyncio.WriteTransport, end: socket.socket) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._encoder = Encoder(None)
        self._end = end
        # Held only during a system call that cannot run a finalizer: the event loop waits for it, too.
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Write a frame. Event loop only."""
        self._transport.write(message)

    def send_at_once(self, call: int, response: InferResponse) -> bool:
        """Send the only response to ``call``. Any thread. Return False if the event loop has to send it: it is large,
        cannot be encoded, or the socket does not accept it now."""
        if any(tensor.nbytes >= INLINE for tensor in response.outputs.values()):
            return False
        try:
            message = self._encoder.answers([reply_of(call, response, True)])
            with self._lock:
                sent = self._end.send(message)
        except (ValueError, OSError):  # OSError: the peer does not read, or has disconnected
            return False
        if sent < len(message):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connection
                self._loop.call_soon_threadsafe(self.send, message[sent:])
        return True

    def close(self) -> None:
        """Close both descriptors; unsent data are lost. Event loop only."""
        with self._lock:
            self._end.close()
        self._transport.abort()
