"""Sockets that take and give whole frames: `FramedSocket` and `FrameSender` where threads speak, `FrameProtocol`,
`Releases` and `ReleasedPlaces` where an event loop does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from time import sleep
from typing import NoReturn

from headrace.ipc.arena import IDLE_S, Arena, Writer
from headrace.ipc.batches import DoneWriter
from headrace.ipc.busy_poll import BusyPoller
from headrace.ipc.codec import Encoder
from headrace.ipc.framing import MOST_INTEGERS, Frame, FrameParser, Kind, integers_frame, read_integers
from headrace.ipc.replies import AnswerStatus, Reply, Times, reply_of, unsendable_reply, unsendable_request
from headrace.messages.request import InferRequest

_RECEIVE_BYTES = 256 * 1024


# ---------------------------------------------------------------------- threads


class FramedSocket:
    """A socket of a process with threads: one of them reads, any may write.

    ``gone`` is called when the peer has gone, and does not return. Who reads looks for the next message for
    ``busy_poll_us`` before it sleeps, while ``is_hurried``.
    """

    def __init__(self, fd: int, gone: Callable[[], NoReturn], busy_poll_us: int = 0) -> None:
        #: Whether the next message is likely to be due in a moment.
        self.is_hurried = True
        self._socket = socket.socket(fileno=fd)
        self._gone = gone
        self._poller = BusyPoller(busy_poll_us)
        self._parser = FrameParser(writable=True)
        self._waiting: deque[bytes] = deque()
        self._is_sending = False
        self._turn = threading.RLock()

    def frames(self) -> Iterator[Frame]:
        """Every frame, as it comes, in a buffer of its own."""
        # One buffer for all: `recv` would map fresh pages for each message, which costs more than the message.
        buffer = memoryview(bytearray(_RECEIVE_BYTES))
        while True:
            try:
                received = self._receive(buffer)
            except OSError as error:
                _raise_a_handlers(error)
                received = 0
            if not received:
                self._gone()
            yield from self._parser.feed(bytearray(buffer[:received]))

    def send(self, message: bytes) -> None:
        """Write a frame. Blocks while the peer does not read.

        A finalizer, or the handler of a signal, may call it in the middle of a call of the same
        thread, which then writes that frame, too.
        """
        with self._turn:
            self._waiting.append(message)
            if self._is_sending:
                return
            while self._waiting:  # looked at again after each round: a frame may come as it ends
                self._is_sending = True
                try:
                    self._write_waiting()
                finally:  # the handler of a signal may raise. What of a frame that cuts off, the peer will notice
                    self._is_sending = False

    def _receive(self, buffer: memoryview) -> int:
        """Wait for bytes; returns how many."""
        if self.is_hurried and (received := self._poller.receive(self._socket, buffer)) is not None:
            return received
        return self._socket.recv_into(buffer)

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._socket.sendall(self._waiting.popleft())
        except OSError as error:
            _raise_a_handlers(error)
            self._gone()


def _raise_a_handlers(error: OSError) -> None:
    """Raise what the handler of a signal has raised, as a ``TimeoutError``; what the system says has a number."""
    if error.errno is None:
        raise error


class SerialQueue:
    """Runs jobs one at a time, in the order in which they were posted, on the threads that post.

    A finalizer may post in the middle of a job of its own thread: then, as for any thread that
    finds another at work, the job is left to whoever is at it. So nothing waits for a lock here.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()

    def post(self, job: Callable[[], None]) -> None:
        """Have ``job`` done, usually before this returns. It must not raise."""
        self._jobs.append(job)
        # Looked at again after each release: a job may have come while the turn was being given up.
        while self._jobs and self._turn.acquire(blocking=False):
            try:
                while self._jobs:
                    self._jobs.popleft()()
            finally:
                self._turn.release()


class FrameSender:
    """Writes answers on ``answers`` and everything else on ``aside``, in order, from any thread; large
    tensors go into ``arena``.

    ``free`` takes offsets in the peer's arena at which nobody looks any more; `release` tells them.
    """

    def __init__(self, answers: FramedSocket, aside: FramedSocket, arena: Arena) -> None:
        self.free: deque[int] = deque()
        self._answers, self._aside = answers, aside
        self._queue = SerialQueue()
        self._writer = Writer(arena)
        self._is_shrinking = False
        self._encoder = Encoder(self._writer)
        self._done = DoneWriter(self._encoder)

    def answer(self, replies: list[Reply], times: Times | None = None) -> None:
        """Send answers, those of a batch with its ``times``. What cannot travel becomes an error."""
        self._queue.post(partial(self._write, replies, times))

    def ask(self, call: int, request: InferRequest, replied: Callable[[Reply], None]) -> None:
        """Send ``request`` to another model; ``replied`` is told if it cannot travel."""
        self._queue.post(partial(self._write_request, call, request, replied))

    def take_back(self, offsets: list[int]) -> None:
        """The peer looks no more at what is at ``offsets`` in our arena."""
        self._queue.post(partial(self._free_places, offsets))

    def release(self) -> None:
        """Tell the peer what is in ``free``."""
        if not self.free:
            return
        offsets: list[int] = []
        with contextlib.suppress(IndexError):  # another thread may be at it, too
            while True:
                offsets.append(self.free.popleft())
        if offsets:
            self._aside.send(integers_frame(Kind.RELEASE, offsets))

    def _write(self, replies: list[Reply], times: Times | None) -> None:
        try:
            message = self._encoder.answers(replies) if times is None else self._done.answers(replies, times)
        except ValueError as error:
            message = self._encoder.answers(self._apart(replies, error), times)
        self._answers.send(message)

    def _apart(self, replies: list[Reply], error: ValueError) -> list[Reply]:
        """What remains to be sent of ``replies`` that cannot travel together."""
        if len(replies) == 1:
            return [unsendable_reply(replies[0], error)]
        for reply in replies:
            if reply.status is not AnswerStatus.LATER:
                self._write([reply], None)
        return []

    def _write_request(self, call: int, request: InferRequest, replied: Callable[[Reply], None]) -> None:
        try:
            message = self._encoder.request(call, request)
        except Exception as error:
            replied(reply_of(call, unsendable_request(error), True))
        else:
            self._aside.send(message)

    def _free_places(self, offsets: list[int]) -> None:
        for offset in offsets:
            self._writer.release(offset)
        if self._writer.can_shrink and not self._is_shrinking:
            self._is_shrinking = True
            threading.Thread(target=self._shrink, name="headrace-shrink", daemon=True).start()

    def _shrink(self) -> None:
        """Give pages of the arena back, once nothing large has been sent for a while."""
        while self._writer.can_shrink:
            sleep(IDLE_S)
            self._queue.post(self._writer.shrink)
        self._is_shrinking = False


# ---------------------------------------------------------------------- an event loop


class FrameProtocol(asyncio.Protocol):
    """Hands on frames as they are complete. ``broken`` is told what ``hear`` raises, or nonsense on the socket."""

    def __init__(
        self, hear: Callable[[Frame], None], hung_up: Callable[[], None], broken: Callable[[Exception], None]
    ) -> None:
        self._hear, self._hung_up, self._broken = hear, hung_up, broken
        self._parser = FrameParser()

    def connection_lost(self, error: Exception | None) -> None:
        self._hung_up()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._parser.feed(data):
                self._hear(message)
        except Exception as error:
            self._broken(error)


async def connect(end: socket.socket, protocol: FrameProtocol) -> asyncio.WriteTransport:
    """Begin to read ``end``; returns what writes to it."""
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, sock=end)
    return transport


class Releases:
    """What this side no longer looks at in the peer's arena, told by ``send`` in one message for many.

    ``soon`` has a call made on the event loop, from any thread.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object], send: Callable[[bytes], None]) -> None:
        self._soon, self._send = soon, send
        self._free: deque[int] = deque()
        self._is_telling = False

    def add(self, offset: int) -> None:
        """Nobody looks at the tensor at ``offset`` any more. Any thread, in the middle of any call of it."""
        self._free.append(offset)
        if not self._is_telling:
            self._is_telling = True
            self._soon(self._tell)

    def _tell(self) -> None:
        self._is_telling = False  # first: what comes from here on is told, too
        while self._free:
            offsets = [self._free.popleft() for _ in range(min(len(self._free), MOST_INTEGERS))]
            self._send(integers_frame(Kind.RELEASE, offsets))


class ReleasedPlaces:
    """Frees what the peer no longer looks at in the arena of ``writer``, whose pages go back when it is idle."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._is_waiting = False

    def hear(self, message: Frame) -> None:
        """Take RELEASE. Raises `ProtocolError`, and `ValueError` for a place that is not taken."""
        for offset in read_integers(message):
            self._writer.release(offset)
        if not self._is_waiting:
            self._wait()

    def _wait(self) -> None:
        self._is_waiting = self._writer.can_shrink
        if self._is_waiting:
            asyncio.get_running_loop().call_later(IDLE_S, self._shrink)

    def _shrink(self) -> None:
        self._writer.shrink()
        self._wait()
