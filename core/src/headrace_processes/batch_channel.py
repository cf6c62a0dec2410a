"""The batches that a child executes: sends requests, receives answers. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.errors import HeadraceError, InternalError, Rescheduled, Unavailable
from headrace.executors.warmup import WarmupSample
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace_processes.ipc.batches import BatchWriter, DoneReader
from headrace_processes.ipc.busy_poll import LoopBusyPoller
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.framing import Frame, ProtocolError
from headrace_processes.ipc.peer_requests import LoopOutgoingRequests
from headrace_processes.ipc.replies import Times


class BatchSink(Protocol):
    """Receives the answers of a child."""

    def batch_done(self, tickets: Sequence[Ticket], answers: Sequence[Answer], times: Times) -> None:
        """Receive the last answers of a batch that has run. ``tickets`` are their requests."""

    def answered(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        """Receive one answer that was sent separately from its batch."""


class BatchChannel(LoopOutgoingRequests):
    """Sends the requests of batches, and passes the answers to ``sink``. ``name`` is the instance's name.

    ``work`` is the socket for batches. ``send_aside`` sends what the child must read while a batch runs.
    """

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        decoder: Decoder,
        work: asyncio.WriteTransport,
        send_aside: Callable[[bytes], None],
        sink: BatchSink,
        busy_poll_us: int,
    ) -> None:
        super().__init__(decoder, send_aside)
        self.sink = sink
        self._name, self._work = name, work
        self._writer, self._reader = BatchWriter(encoder), DoneReader(decoder)
        self._poller = LoopBusyPoller(busy_poll_us, self.in_flight.__len__)

    def run(self, batch: Sequence[Ticket]) -> None:
        """Send a batch for execution. Raises `HeadraceError` if it cannot be sent."""
        numbered = self.numbered(batch)
        try:
            message = self._writer.requests(numbered)
        except ValueError as error:
            raise InternalError(f"the batch cannot be sent to '{self._name}': {error}") from error
        self.enter(numbered)
        self._work.write(message)
        if len(batch) == 1:  # larger batches take longer, and under load the loop is always busy
            self._poller.expect()

    def done(self, message: Frame) -> None:
        """Handle DONE, ALIKE_DONE and LAYOUT. Raises `ProtocolError`, or another error for a malformed message."""
        done = self._reader.receive(message, self.in_flight)
        if done is None:
            return
        calls, answers, times = done
        self._poller.received()
        in_flight = self.in_flight
        tickets = [in_flight[call] for call in calls]
        if len(tickets) > 1 and len(set(tickets)) < len(tickets):
            raise ProtocolError("DONE: two answers to one request")
        for call in calls:  # only after all checks, so that an invalid message loses no request
            del in_flight[call]
        self.sink.batch_done(tickets, answers, times)

    def _deliver(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        self.sink.answered(ticket, answer, final)


class WarmUp:
    """Receives a child's answers while it runs the warm-up samples of its config."""

    def __init__(self) -> None:
        self._waiting: set[Ticket] = set()
        self._error: HeadraceError | None = None
        self._done = asyncio.Event()

    async def run(self, batches: BatchChannel, sample: WarmupSample, instance: str) -> None:
        """Execute ``sample`` on ``instance``. Raises `InternalError` with the sample's name if any request fails."""
        for number in range(sample.count):
            sample.log_iteration(instance, number + 1)
            self.require_alive()
            self._waiting = set(sample.tickets)
            self._done.clear()
            batches.run(sample.tickets)
            await self._done.wait()
            if self._error is not None:
                raise InternalError(f"failed to run warmup sample '{sample.name}': {self._error.message}; ")

    def require_alive(self) -> None:
        """Raise `InternalError` if the child has died since it was loaded."""
        if self._error is not None:
            raise InternalError(self._error.message)

    def batch_done(self, tickets: Sequence[Ticket], answers: Sequence[Answer], times: Times) -> None:
        for ticket, answer in zip(tickets, answers, strict=True):
            self.answered(ticket, answer, True)

    def answered(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        if isinstance(answer, HeadraceError) and not isinstance(answer, Rescheduled):
            self._error = answer
        if final:
            self._waiting.discard(ticket)
        if not self._waiting:
            self._done.set()

    def child_died(self, child: object, reason: str) -> None:
        self._error = Unavailable(reason)
        self._done.set()
