"""The fast path: the calling thread reads the answer itself, and the thread that has the answer writes it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn, cast

import numpy as np
import pytest

from headrace.errors import HeadraceError
from headrace.executors.stream_runners import CreditWindow
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.tensor import Tensor
from headrace.messages.ticket import UNREAD, Ticket
from headrace_processes.ipc.channel import FramedSocket
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.framing import FrameParser, Kind, read_integers
from headrace_processes.ipc.peer_requests import (
    READS,
    FastPathCalls,
    FastPathReplies,
    LoopOutgoingRequests,
    OutgoingRequests,
)
from headrace_processes.ipc.replies import Reply, reply_of
from headrace_processes.ipc.tensors import INLINE


def response(count: int = 1, **fields: Any) -> InferResponse:
    return InferResponse({"y": np.arange(count, dtype=np.float32)}, **fields)


class Both:
    """The server's end and the child's end of a channel."""

    def __init__(self, replies: FastPathReplies, child: socket.socket) -> None:
        self.replies, self.child = replies, child

    async def send(self, call: int, response: InferResponse) -> bool:
        return await asyncio.to_thread(self.replies.send_at_once, call, response)

    def received(self, count: int = 1) -> list[Reply]:
        """Return the next ``count`` replies. The event loop must not be needed for them."""
        frames = FrameParser()
        replies: list[Reply] = []
        decoder = Decoder(None, lambda offset: None)
        while len(replies) < count:
            for message in frames.feed(self.child.recv(1 << 20)):
                replies += decoder.answers(message)
        return replies


def run(scenario: Callable[[Both], Coroutine[Any, Any, None]]) -> None:
    async def connected() -> None:
        ours, theirs = socket.socketpair()
        theirs.settimeout(10)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        replies = FastPathReplies(transport, ours.dup())
        with theirs:
            await scenario(Both(replies, theirs))
        replies.close()

    asyncio.run(connected())


def values(tensor: Tensor) -> list[float]:
    return list(np.asarray(tensor))


def test_a_response_is_there_without_the_loop() -> None:
    async def scenario(ends: Both) -> None:
        thread = threading.Thread(target=ends.replies.send_at_once, args=(7, response(3, parameters={"k": 1})))
        thread.start()
        (reply,) = ends.received()  # the loop stands here
        assert (reply.call, reply.final) == (7, True)
        assert isinstance(reply.answer, InferResponse)
        assert (values(reply.answer.outputs["y"]), reply.answer.parameters) == ([0, 1, 2], {"k": 1})
        thread.join()

    run(scenario)


@pytest.mark.parametrize("bytes_too_many", [0, 4, 1 << 24])
def test_large_tensors_are_left_to_the_loop(bytes_too_many: int) -> None:
    async def scenario(ends: Both) -> None:
        assert not await ends.send(1, response((INLINE + bytes_too_many) // 4))
        assert await ends.send(2, response(INLINE // 4 - 1))
        (reply,) = ends.received()
        assert reply.call == 2  # and nothing of the first

    run(scenario)


def test_answer_that_cannot_be_written_at_once_is_sent_by_the_loop() -> None:
    async def scenario(ends: Both) -> None:
        odd: Any = {"k": object()}
        assert not await ends.send(1, response(parameters=odd))
        assert await ends.send(2, response())
        (reply,) = ends.received()
        assert reply.call == 2

    run(scenario)


def test_a_child_that_does_not_read_loses_nothing() -> None:
    """The event loop sends what the socket does not accept at once."""

    async def scenario(ends: Both) -> None:
        ends.replies._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        count = 0
        while await ends.send(count, response(6000, parameters={"text": "x" * 150_000})):
            count += 1
        assert count
        replies = await asyncio.to_thread(ends.received, count)
        assert [reply.call for reply in replies] == list(range(count))
        assert {len(str(reply.answer.parameters["text"])) for reply in replies} == {150_000}  # type: ignore[union-attr]

    run(scenario)


def test_a_write_to_an_exited_child_is_left_to_the_loop() -> None:
    async def scenario(ends: Both) -> None:
        ends.child.close()
        assert not await ends.send(1, response())

    run(scenario)


def test_nothing_is_sent_once_it_is_closed() -> None:
    async def scenario(ends: Both) -> None:
        ends.replies.close()
        assert not await ends.send(1, response())

    run(scenario)


class Interrupted(dict[str, Tensor]):
    """Outputs whose encoding runs a finalizer that waits for the event loop."""

    by: Callable[[], object]

    def items(self) -> Any:
        self.by()
        return super().items()


def test_the_loop_can_close_it_in_the_middle_of_an_encoding() -> None:
    async def scenario(ends: Both) -> None:
        loop = asyncio.get_running_loop()

        async def close() -> None:
            ends.replies.close()

        def wait_for_the_loop() -> None:
            asyncio.run_coroutine_threadsafe(close(), loop).result(10)
            waited.append(True)

        waited: list[bool] = []
        outputs = Interrupted(response().outputs)
        outputs.by = wait_for_the_loop
        assert not await ends.send(1, InferResponse(outputs))
        assert waited

    run(scenario)


def test_the_end_of_the_loop_in_the_middle_of_an_answer_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.new_event_loop()

    async def make() -> FastPathReplies:
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        return FastPathReplies(transport, end)

    end = ours.dup()
    replies = loop.run_until_complete(make())
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    replies._transport.abort()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    with theirs, end:
        while replies.send_at_once(1, response(6000, parameters={"text": "x" * 150_000})):
            pass


class Interruption(BaseException):
    """Raised by a signal handler."""


def disconnected() -> NoReturn:
    raise AssertionError("the server's end is open")


class Ends:
    """The child's calls and the server's end of the channel."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.line, self.server = FramedSocket(ours.detach(), disconnected), theirs
        self.calls = FastPathCalls(self.line, Decoder(None, lambda offset: None))

    def answer(self, call: int, id: str) -> None:
        response = InferResponse({"y": np.ones(1, np.float32)}, {"id": id})
        self.server.sendall(Encoder(None).answers([reply_of(call, response, True)]))

    def ask(self, call: int) -> Any:
        """Return the answer, or False if the fast path is not free."""
        request = InferRequest("other", {"x": np.ones(1, np.float32)})
        return self.calls.try_acquire(request) and self.calls.ask(call, request)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with theirs:
        ends = Ends(ours, theirs)
        yield ends
    ends.line._socket.close()


def test_one_call_after_the_other_is_answered(ends: Ends) -> None:
    for call in (1, 2, 3):
        ends.answer(call, f"the {call}.")
        assert ends.ask(call).parameters["id"] == f"the {call}."


def test_a_request_that_cannot_travel_is_refused_and_the_next_is_not(ends: Ends) -> None:
    odd = InferRequest("other", {}, parameters={"k": cast("Any", object())})
    assert ends.calls.try_acquire(odd)
    assert isinstance(ends.calls.ask(1, odd), HeadraceError)
    ends.answer(2, "the next")
    assert ends.ask(2).parameters["id"] == "the next"


def test_the_answer_to_an_interrupted_call_is_never_taken_for_anothers(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(buffer: memoryview) -> int:
        raise Interruption

    with monkeypatch.context() as patch:
        patch.setattr(ends.line, "_receive", interrupt)
        with pytest.raises(Interruption):
            ends.ask(1)
    ends.answer(1, "too late")
    assert ends.ask(2) is False  # then the loop sends it


# ------------------------------------------------------------------ requests that are cancelled


class Unlisted(dict[int, Ticket]):
    """Requests that can only be found by number: to search thousands for each cancelled one takes a second."""

    def items(self) -> NoReturn:
        raise AssertionError("all requests are looked through")

    values = __iter__ = items


def test_a_cancelled_request_is_reported_by_its_number_without_a_search() -> None:
    sent: list[bytes] = []
    outgoing = OutgoingRequests(Decoder(None, lambda offset: None), sent.append)
    outgoing.in_flight = Unlisted()
    tickets = [Ticket(InferRequest("m", {}), lambda answer, final: None) for _ in range(4)]
    numbered = outgoing.numbered(tickets)
    outgoing.enter(numbered)
    tickets[2].cancel()
    tickets[1].stop()
    outgoing.answer(reply_of(numbered[3][0], response(), True))
    tickets[3].cancel()  # it has its last answer
    messages = [(frame.kind, read_integers(frame)) for frame in FrameParser().feed(b"".join(sent))]
    assert messages == [(Kind.CANCEL, [numbered[2][0]]), (Kind.STOP, [numbered[1][0]])]


def test_the_reads_of_a_request_are_sent_together() -> None:
    """One message for `READS` of them. The producer, which waits until half of its window is read, resumes."""
    assert UNREAD // 2 % READS == 0

    async def scenario() -> None:
        frames = FrameParser()
        sent: list[list[int]] = []

        def send(message: bytes) -> None:
            sent.extend(list(read_integers(frame)) for frame in frames.feed(message) if frame.kind == Kind.READ)

        requests = LoopOutgoingRequests(Decoder(None, lambda offset: None), send)
        tickets = [Ticket(InferRequest("any", {}), lambda answer, final: None) for _ in range(2)]
        for call, ticket in enumerate(tickets, 1):
            requests.enter([(call, ticket)])
            requests.answer(reply_of(call, response(), False))
        window = CreditWindow()
        for _ in range(UNREAD):
            window.acquire()
        for number in range(1, UNREAD + 1):
            for ticket in tickets:
                ticket.read()
            await asyncio.sleep(0)
            if number == READS - 1:
                assert sent == []
            if number == READS:
                assert [sorted(set(calls)) for calls in sent] == [[1, 2]]
                assert [calls.count(1) for calls in sent] == [READS]
            if number == UNREAD // 2:
                for _ in range(sum(calls.count(2) for calls in sent)):
                    window.release()
                assert not window.is_full
                await asyncio.to_thread(window.acquire)  # it does not wait

    asyncio.run(asyncio.wait_for(scenario(), 10))
