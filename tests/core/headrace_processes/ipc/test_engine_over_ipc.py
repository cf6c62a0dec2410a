"""A peer that sends requests to the engine over `headrace_processes.ipc`, without the rest of a model's process."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
import pytest

from headrace.errors import Cancelled, NotFound
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.server import Server
from headrace_processes.ipc.arena import Arena, Reader, Writer
from headrace_processes.ipc.channel import FramedSocket, FrameProtocol, FrameSender, Releases, connect
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.framing import Frame, Kind, read_integers
from headrace_processes.ipc.peer_requests import IncomingRequests, OutgoingRequests
from tests.core.conftest import WriteModel, make_ticket

WaitUntil = Callable[..., None]

CONFIG = """
backend: "identity" max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] }
"""
ARENA_BYTES = 64 << 20


class Left(BaseException):
    """Raised to end the thread that reads."""


def disconnected() -> NoReturn:
    raise Left


class EngineEnd:
    """The server's end, on its event loop. Of the server it needs only the function that submits requests."""

    def __init__(self, submit: Callable[[Ticket], None], inbound: Arena, outbound: Arena) -> None:
        self._writer, self._reader, self._submit = Writer(outbound), Reader(inbound), submit
        self._requests: IncomingRequests
        self._transport: asyncio.WriteTransport
        self.trouble: list[Exception] = []

    async def open(self, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        decoder = Decoder(self._reader, Releases(loop.call_soon_threadsafe, self._send).add)
        self._requests = IncomingRequests(Encoder(self._writer), decoder, self._submit, Ticket.cancel, {})
        self._transport = await connect(end, FrameProtocol(self._receive, self._hung_up, self.trouble.append))

    def _send(self, message: bytes) -> None:
        self._transport.write(message)

    def _receive(self, message: Frame) -> None:
        if message.kind == Kind.RELEASE:
            for offset in read_integers(message):
                self._writer.release(offset)
        else:
            assert self._requests.receive(message, self._send)

    def _hung_up(self) -> None:
        self._requests.close()


class FrontendEnd:
    """The client's end: threads, a socket and two arenas."""

    def __init__(self, fd: int, inbound: Arena, outbound: Arena) -> None:
        self._channel = FramedSocket(fd, disconnected)
        self._sender = FrameSender(self._channel, self._channel, inbound)
        self._requests = OutgoingRequests(Decoder(Reader(outbound), self._sender.free.append), self._channel.send)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        ((call, _),) = numbered = self._requests.numbered((ticket,))
        self._requests.enter(numbered)
        self._sender.ask(call, ticket.request, self._requests.answer)

    def ask(self, model: str, x: Any) -> Answer:
        answers: SimpleQueue[Answer] = SimpleQueue()
        self.submit(
            make_ticket(model, {"INPUT0": np.asarray(x, np.float32)}, lambda answer, final: answers.put(answer))
        )
        return answers.get(timeout=10)

    def hang_up(self) -> None:
        if not self._thread.is_alive():
            return
        self._channel._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._channel._socket.close()

    def _listen(self) -> None:
        try:
            for message in self._channel.frames():
                if message.kind == Kind.RELEASE:
                    self._sender.free_blocks(read_integers(message))
                else:
                    self._requests.receive(message)
                self._sender.release()
        except Left:
            return


class Both:
    """Both ends: the requests of the frontend's end are answered by ``submit`` on ``loop``."""

    def __init__(self, submit: Callable[[Ticket], None], loop: asyncio.AbstractEventLoop) -> None:
        ours, theirs = socket.socketpair()
        self.arenas = inbound, outbound = Arena.create(ARENA_BYTES), Arena.create(ARENA_BYTES)
        self.engine = EngineEnd(submit, inbound, outbound)
        asyncio.run_coroutine_threadsafe(self.engine.open(theirs), loop).result(10)
        attached = [Arena.attach(os.dup(arena.fd), ARENA_BYTES) for arena in self.arenas]
        self.arenas += tuple(attached)  # type: ignore[assignment]
        self.frontend = FrontendEnd(ours.detach(), *attached)

    def close(self) -> None:
        self.frontend.hang_up()
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def server(repository: Path, write_model: WriteModel) -> Iterator[Server]:
    write_model("echo", CONFIG)
    with Server(repository) as server:
        yield server


@pytest.fixture
def open_ends(server: Server) -> Iterator[Callable[..., Both]]:
    opened: list[Both] = []

    def open_ends(submit: Callable[[Ticket], None] = server.submit) -> Both:
        opened.append(Both(submit, server.loop))
        return opened[-1]

    yield open_ends
    for ends in opened:
        ends.close()
        assert ends.engine.trouble == []


@pytest.mark.parametrize("count", [1, 1000, 1_000_000])
def test_any_peer_is_answered_by_the_server_and_releases_read_blocks(
    open_ends: Callable[..., Both], wait_until: WaitUntil, count: int
) -> None:
    ends = open_ends()
    for number in range(20):
        x = np.arange(number, number + count, dtype=np.float32)
        answer = ends.frontend.ask("echo", x)
        assert isinstance(answer, InferResponse)
        assert np.array_equal(np.asarray(answer.outputs["OUTPUT0"]), x)
        del answer
    writers = ends.engine._writer, ends.frontend._sender._writer

    def are_empty() -> bool:
        ends.frontend.ask("echo", [1.0])  # read responses are reported with the next message
        return all(writer._free_list.is_empty for writer in writers)

    wait_until(are_empty, "nothing is left in the arenas")


def test_a_refusal_is_an_answer(server: Server, open_ends: Callable[..., Both]) -> None:
    def submit(ticket: Ticket) -> None:
        try:
            server.submit(ticket)
        except NotFound as error:
            ticket.respond(error, True)

    answer = open_ends(submit).frontend.ask("nobody", [1.0])
    assert isinstance(answer, NotFound)
    assert "nobody" in answer.message


def test_the_engine_receives_reads_stops_and_cancellations(open_ends: Callable[..., Both]) -> None:
    """Responses are read one by one, then the request is cancelled. A request is also cancelled on a disconnect."""
    submitted: SimpleQueue[Ticket] = SimpleQueue()
    changes: SimpleQueue[str] = SimpleQueue()

    def submit(ticket: Ticket) -> None:
        ticket.on_read = lambda ticket: changes.put("read")
        ticket.on_cancel = lambda ticket: changes.put("cancelled" if ticket.abandoned else "stopped")
        submitted.put(ticket)
        ticket.respond(InferResponse({"OUTPUT0": np.ones(1, np.float32)}), False)

    ends = open_ends(submit)
    answers: SimpleQueue[tuple[Answer, bool]] = SimpleQueue()
    first, second = [make_ticket("any", {}, lambda *answer: answers.put(answer), decoupled=True) for _ in range(2)]
    ends.frontend.submit(first)
    answer, final = answers.get(timeout=10)
    assert isinstance(answer, InferResponse)
    assert not final
    for change, expected in ((first.read, "read"), (first.stop, "stopped"), (first.cancel, "cancelled")):
        change()
        assert changes.get(timeout=10) == expected
    ends.frontend.submit(second)
    assert submitted.get(timeout=10).request.decoupled
    assert answers.get(timeout=10)[1] is False
    ends.frontend.hang_up()
    assert changes.get(timeout=10) == "cancelled"
    assert changes.empty()  # the first had been


def test_an_answer_that_is_final_ends_the_call(open_ends: Callable[..., Both]) -> None:
    def submit(ticket: Ticket) -> None:
        ticket.respond(Cancelled("no"), True)

    ends = open_ends(submit)
    assert isinstance(ends.frontend.ask("any", [1.0]), Cancelled)
    assert not ends.frontend._requests.in_flight
