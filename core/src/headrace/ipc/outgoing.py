"""Requests from the side that asks: numbered, answered, cancelled, and read."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

from headrace.ipc.channel import FramedSocket
from headrace.ipc.codec import Decoder, Encoder, Reply, unsendable_request
from headrace.ipc.framing import Frame, Kind, ProtocolError, integers_frame
from headrace.ipc.tensors import INLINE
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket


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
            ticket.on_cancel = tell

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

    def _tell_cancelled(self, ticket: Ticket) -> None:
        for call, other in tuple(self.in_flight.items()):  # at once: other threads add to it
            if other is ticket:
                self._send(integers_frame(Kind.CANCEL if ticket.abandoned else Kind.STOP, (call,)))
                return

    def _has_read(self, call: int, ticket: Ticket) -> None:
        self._send(integers_frame(Kind.READ, (call,)))


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
