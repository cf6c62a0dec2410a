"""`FramedSocket`: the end of a socket in a process with threads."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import pytest

from headrace.errors import HeadraceError
from headrace.messages.response import InferResponse
from headrace_processes.ipc import channel
from headrace_processes.ipc.arena import Arena, Reader
from headrace_processes.ipc.channel import FramedSocket, FrameSender
from headrace_processes.ipc.codec import Decoder
from headrace_processes.ipc.framing import Frame, FrameParser, Kind, integers_frame, read_integers
from headrace_processes.ipc.replies import reply_of

if TYPE_CHECKING:
    from tests.core.conftest import Interrupted


class Peer:
    """The server's end: a thread reads it and records the frames."""

    def __init__(self, end: socket.socket) -> None:
        self.heard: list[int] = []
        self._end = end
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        frames = FrameParser()
        while data := self._end.recv(1 << 16):
            self.heard += [number for frame in frames.feed(data) for number in read_integers(frame)]

    def hang_up(self) -> list[int]:
        """Close the connection. Return the numbers that were received."""
        self._end.shutdown(socket.SHUT_RD)  # what has been sent is still read
        self._thread.join(10)
        return self.heard


class Left(BaseException):
    """Raised instead of ending the process when the server has disconnected."""


def leave() -> NoReturn:
    raise Left


@pytest.fixture
def ends() -> Iterator[tuple[FramedSocket, Peer]]:
    ours, theirs = socket.socketpair()
    line = FramedSocket(ours.detach(), leave)
    with theirs:
        yield line, Peer(theirs)
    line._socket.close()  # elsewhere it ends with its process


def test_a_finalizer_may_send_in_the_middle_of_a_send_and_every_frame_arrives_whole_and_once(
    ends: tuple[FramedSocket, Peer], interrupted: Interrupted
) -> None:
    line, peer = ends
    numbers, sent = iter(range(1000)), []

    def send() -> None:
        number = next(numbers)
        line.send(integers_frame(Kind.RELEASE, [number]))
        sent.append(number)

    def call() -> None:
        send()
        assert not line._waiting

    assert interrupted(call, send) > 5
    assert sorted(peer.hang_up()) == sorted(sent)


def test_frames_of_many_threads_arrive_whole_and_in_the_order_of_each(
    ends: tuple[FramedSocket, Peer],
) -> None:
    line, peer = ends

    def send(first: int) -> None:
        for number in range(first, first + 500):
            line.send(integers_frame(Kind.RELEASE, [number] * 50))

    threads = [threading.Thread(target=send, args=(first,), daemon=True) for first in (0, 1000, 2000, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    heard = peer.hang_up()[::50]
    for first in (0, 1000, 2000, 3000):
        assert [number for number in heard if first <= number < first + 1000] == list(range(first, first + 500))


class Alarm(TimeoutError):
    """Raised by a signal handler, to limit the time of a call."""


def test_error_of_a_signal_handler_during_a_wait_does_not_end_the_process(
    ends: tuple[FramedSocket, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, peer = ends

    def interrupt(buffer: memoryview) -> int:
        raise Alarm

    monkeypatch.setattr(line, "_receive", interrupt)
    with pytest.raises(Alarm):
        next(line.frames())
    assert peer.hang_up() == []


def test_a_broken_socket_is(ends: tuple[FramedSocket, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*given: object) -> int:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    line, peer = ends
    monkeypatch.setattr(line, "_receive", reset)
    with pytest.raises(Left):
        next(line.frames())
    assert peer.hang_up() == []


@pytest.mark.parametrize("raised", [Alarm, KeyError])
def test_frames_are_sent_after_one_that_a_handler_cut_off(
    ends: tuple[FramedSocket, Peer], raised: type[Exception]
) -> None:
    line, peer = ends

    class Interrupted:
        def sendall(self, message: bytes) -> None:
            raise raised

    whole, line._socket = line._socket, cast("socket.socket", Interrupted())
    with pytest.raises(raised):
        line.send(integers_frame(Kind.RELEASE, [1]))
    line._socket = whole
    line.send(integers_frame(Kind.RELEASE, [2]))
    assert peer.hang_up() == [2]


def test_answers_added_while_another_is_written_share_a_message() -> None:
    """In the order in which they are given. One that cannot be sent becomes an error, and spoils no other.

    A large one has a message of its own: the receiver keeps a whole message while one of its answers is unread.
    """
    ours, theirs = socket.socketpair()
    arena = Arena.create(1 << 20)
    line = FramedSocket(ours.detach(), leave)
    sender = FrameSender(line, line, arena)
    values: list[Any] = [np.array([number], kind) for number, kind in enumerate(("f4", "f4", "c8", "f4"))]
    values += [np.zeros(1024, np.float32), "no tensor"]
    replies = [reply_of(call, InferResponse({"y": value}), call == 3) for call, value in enumerate(values)]

    def give(*calls: int) -> None:
        for call in calls:
            sender.answer_late(replies[call])

    sender._queue.post(lambda: give(0, 1, 3))
    sender._queue.post(lambda: give(0, 2, 1))
    sender._queue.post(lambda: give(0, 1, 4, 1))
    sender._queue.post(lambda: give(5))
    line._socket.close()
    received = b""
    with theirs:
        while data := theirs.recv(1 << 16):
            received += data
    frames = list(FrameParser().feed(received))
    assert [frame.kind for frame in frames] == [Kind.ANSWERS] * 8
    assert [frame.number for frame in frames] == [3, 1, 1, 1, 2, 1, 1, 1]
    heard = [reply for frame in frames for reply in Decoder(Reader(arena), lambda _: None).answers(frame)]
    assert [reply.call for reply in heard] == [0, 1, 3, 0, 2, 1, 0, 1, 4, 1, 5]
    assert [reply.final for reply in heard] == [False, False, True, *[False] * 8]
    assert isinstance(heard[4].answer, HeadraceError)
    assert "cannot be sent" in heard[4].answer.message
    arena.close()


def test_answers_of_one_step_are_gathered_and_precede_later_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered answers are sent after a time, above a number, before the answers of a batch, or by `flush`."""
    monkeypatch.setattr(channel, "_GATHER_S", 0.05)
    monkeypatch.setattr(channel, "_MAX_GATHERED", 6)
    ours, theirs = socket.socketpair()
    arena = Arena.create(1 << 20)
    line = FramedSocket(ours.detach(), leave)
    sender = FrameSender(line, line, arena)
    parser = FrameParser()
    theirs.settimeout(30)

    def receive(count: int = 1) -> list[tuple[Kind, int]]:
        frames: list[Frame] = []
        while len(frames) < count:
            frames += parser.feed(theirs.recv(1 << 16))
        return [(Kind(frame.kind), frame.number) for frame in frames]

    def gather(count: int) -> None:
        for call in range(count):
            sender.answer_late(reply_of(call, InferResponse({"y": np.zeros(1, np.float32)}), False), gather=True)

    gather(5)
    assert receive() == [(Kind.ANSWERS, 5)]
    gather(7)
    assert receive() == [(Kind.ANSWERS, 7)]
    monkeypatch.setattr(channel, "_GATHER_S", 600)
    gather(3)
    sender.answer([reply_of(9, None, True)], (1, 2, 3, 4))
    assert receive(2) == [(Kind.ANSWERS, 3), (Kind.DONE, 1)]
    gather(2)
    sender.flush()
    assert receive() == [(Kind.ANSWERS, 2)]
    theirs.close()
    line._socket.close()
    arena.close()
