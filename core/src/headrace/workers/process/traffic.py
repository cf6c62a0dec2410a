"""The requests that a child executes: batches go to it, answers come back. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from headrace.errors import InternalError
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.workers.process.awake import AwakeLoop
from headrace.workers.process.wire.answers import Status, Times, read_times
from headrace.workers.process.wire.codec import Decoder, Encoder
from headrace.workers.process.wire.failure import WireError
from headrace.workers.process.wire.frames import Frame, Kind, integers_frame


class Recipient(Protocol):
    """Who is given the answers."""

    def batch_done(self, requests: Sequence[InferRequest], answers: Sequence[Answer], times: Times) -> None:
        """A batch has run. ``requests`` are those of it that have their last answer."""

    def answered(self, request: InferRequest, answer: Answer, final: bool) -> None:
        """An answer apart from its batch."""


class Traffic:
    """``in_flight`` maps the numbers of calls to requests. ``name`` is that of the instance.

    ``work`` is the line for batches; ``send_aside`` sends what must be heard while one runs.
    """

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        decoder: Decoder,
        work: asyncio.WriteTransport,
        send_aside: Callable[[bytes], None],
        recipient: Recipient,
        busy_poll_us: int,
    ) -> None:
        self.in_flight: dict[int, InferRequest] = {}
        self.recipient = recipient
        self._name, self._encoder, self._decoder = name, encoder, decoder
        self._work, self._send_aside = work, send_aside
        self._loop = asyncio.get_running_loop()
        self._awake = AwakeLoop(busy_poll_us, self.in_flight.__len__)
        self._calls = 0
        self._read: list[int] = []

    def run(self, batch: Sequence[InferRequest]) -> None:
        """Have a batch executed. Raises `HeadraceError` if it cannot be sent."""
        numbered = []
        for request in batch:
            self._calls = call = self._calls + 1
            numbered.append((call, request))
        try:
            message = self._encoder.requests(Kind.RUN, numbered)
        except ValueError as error:
            raise InternalError(f"the batch cannot be sent to '{self._name}': {error}") from error
        cancel = self._cancel
        for call, request in numbered:
            self.in_flight[call] = request
            request.on_cancel = cancel
        self._work.write(message)
        if len(batch) == 1:  # more take longer, and where there are many, there is always something to do
            self._awake.stay()

    def done(self, message: Frame) -> None:
        """A batch has run."""
        replies = [reply for reply in self._decoder.answers(message) if reply.status is not Status.LATER]
        times = read_times(message)
        self._awake.heard()
        requests = [self.in_flight[reply.call] for reply in replies]
        if len(set(requests)) < len(requests):
            raise WireError("DONE: two answers to one request")
        for reply in replies:  # only now, so that nothing is lost in a message that makes no sense
            del self.in_flight[reply.call]
        self.recipient.batch_done(requests, [reply.answer for reply in replies], times)

    def answers(self, message: Frame) -> None:
        """Answers have come that their batch did not give."""
        for reply in self._decoder.answers(message):
            request = self.in_flight[reply.call]
            if reply.final:
                del self.in_flight[reply.call]
            elif request.on_read is None:
                request.on_read = partial(self._has_read, reply.call)
            self.recipient.answered(request, reply.answer, reply.final)

    def _cancel(self, request: InferRequest) -> None:
        for call, other in self.in_flight.items():
            if other is request:
                self._send_aside(integers_frame(Kind.CANCEL if request.abandoned else Kind.ENOUGH, (call,)))
                return

    def _has_read(self, call: int, request: InferRequest) -> None:
        if not self._read:
            self._loop.call_soon(self._tell_reads)
        self._read.append(call)

    def _tell_reads(self) -> None:
        calls, self._read = self._read, []
        self._send_aside(integers_frame(Kind.READ, calls))
