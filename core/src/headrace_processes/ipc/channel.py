"""Sockets that send and receive whole frames: `FramedSocket` and `FrameSender` for threads; `FrameProtocol`, `Releases`
and `ReleasedBlocks` for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from time import sleep
from typing import NoReturn

from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace_processes.ipc.arena import IDLE_S, Arena, Writer
from headrace_processes.ipc.batches import DoneWriter
from headrace_processes.ipc.busy_poll import BusyPoller
from headrace_processes.ipc.codec import Encoder
from headrace_processes.ipc.framing import MAX_INTEGERS, Frame, FrameParser, Kind, integers_frame, read_integers
from headrace_processes.ipc.replies import AnswerStatus, Reply, Times, reply_of, unsendable_reply, unsendable_request

_RECEIVE_BYTES = 256 * 1024
#: The most bytes of tensors in a message of several late answers. The receiver keeps the message until all are read.
_MAX_SHARED_BYTES = 4096
#: Late answers are gathered for this many seconds. Above this number, their sender waits until the peer reads.
_GATHER_S, _MAX_GATHERED = 0.0003, 256


# ---------------------------------------------------------------------- threads


class FramedSocket:
    """A socket of a process with threads: one thread reads, any thread may write.

    ``disconnected`` is called when the peer has disconnected, and must not return. While ``is_reply_due``, the reading
    thread polls for up to ``busy_poll_us`` before it sleeps.
    """

    def __init__(self, fd: int, disconnected: Callable[[], NoReturn], busy_poll_us: int = 0) -> None:
        #: True if the next message is probably due in a moment.
        self.is_reply_due = True
        self._socket = socket.socket(fileno=fd)
        self._disconnected = disconnected
        self._poller = BusyPoller(busy_poll_us)
        self._parser = FrameParser(writable=True)
        self._waiting: deque[bytes] = deque()
        self._is_sending = False
        self._lock = threading.RLock()

    def frames(self) -> Iterator[Frame]:
        """Yield each frame as it arrives, in a writable buffer that belongs to it. Blocks."""
        # One receive buffer for all messages: `recv` would map new pages for each, which costs more than the message.
        buffer = memoryview(bytearray(_RECEIVE_BYTES))
        while True:
            try:
                received = self._receive(buffer)
            except OSError as error:
                _raise_if_from_handler(error)
                received = 0
            if not received:
                self._disconnected()
            yield from self._parser.feed(bytearray(buffer[:received]))

    def send(self, message: bytes) -> None:
        """Write a frame. Blocks while the peer does not read. Any thread.

        A finalizer or a signal handler may call it while the same thread is in `send`. Then the interrupted call
        writes that frame, too.
        """
        with self._lock:
            self._waiting.append(message)
            if self._is_sending:
                return
            while self._waiting:  # checked again after each round: a frame may have been added at its end
                self._is_sending = True
                try:
                    self._write_waiting()
                finally:  # a signal handler may raise. If that truncates a frame, the peer detects it
                    self._is_sending = False

    def _receive(self, buffer: memoryview) -> int:
        """Wait for bytes. Return how many were read, 0 if the peer has disconnected."""
        if self.is_reply_due and (received := self._poller.receive(self._socket, buffer)) is not None:
            return received
        return self._socket.recv_into(buffer)

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._socket.sendall(self._waiting.popleft())
        except OSError as error:
            _raise_if_from_handler(error)
            self._disconnected()


def _raise_if_from_handler(error: OSError) -> None:
    """Raise ``error`` if a signal handler raised it, such as a ``TimeoutError``. It then has no errno."""
    if error.errno is None:
        raise error


class SerialQueue:
    """Runs jobs one at a time, in the order in which they were posted, on the threads that post them.

    If a thread is already running jobs, it runs the new job, too, and `post` returns at once. So no thread waits for a
    lock here, and a finalizer may post a job while its own thread runs one.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job``, or let the thread that is running jobs run it. It must not raise."""
        self._jobs.append(job)
        # Checked again after each release: a job may have been posted just before the release.
        while self._jobs and self._lock.acquire(blocking=False):
            try:
                while self._jobs:
                    self._jobs.popleft()()
            finally:
                self._lock.release()


class FrameSender:
    """Sends answers on ``answers`` and everything else on ``aside``, in order, from any thread. Large tensors are
    written to ``arena``.

    ``free`` collects the offsets in the peer's arena that are no longer used; `release` sends them to the peer.
    """

    def __init__(
        self, answers: FramedSocket, aside: FramedSocket, arena: Arena, encoder: type[Encoder] = Encoder
    ) -> None:
        self.free: deque[int] = deque()
        self._answers, self._aside = answers, aside
        self._queue = SerialQueue()
        #: Answers of `answer_late` that are not written yet, and the queue that wakes the thread that writes them.
        self._late: deque[Reply] = deque()
        self._gathered: SimpleQueue[None] | None = None
        self._is_gathering = False
        self._writer = Writer(arena)
        self._is_shrinking = False
        self._encoder = encoder(self._writer)
        self._done = DoneWriter(self._encoder)

    def answer(self, replies: list[Reply], times: Times | None = None) -> None:
        """Send answers; with ``times``, they are the answers of a whole batch. One that cannot be encoded becomes an
        error."""
        if self._late:
            self._queue.post(self._write_late)
        self._queue.post(partial(self._write, replies, times))

    def answer_late(self, reply: Reply, gather: bool = False) -> None:
        """Send an answer that is not part of a batch's result. With ``gather``, others that follow within `_GATHER_S`
        share its message: an engine often has the next part of many texts at the same time."""
        self._late.append(reply)
        if not gather or len(self._late) > _MAX_GATHERED:
            self._queue.post(self._write_late)
        elif not self._is_gathering:
            self._is_gathering = True
            if self._gathered is None:
                self._gathered = SimpleQueue()
                threading.Thread(target=self._gather, name="headrace-answers", daemon=True).start()
            self._gathered.put(None)

    def flush(self) -> None:
        """Send the answers that are being gathered, and return when all answers are written."""
        written = threading.Event()
        self._queue.post(self._write_late)
        self._queue.post(written.set)
        written.wait()

    def ask(self, call: int, request: InferRequest, replied: Callable[[Reply], None]) -> None:
        """Send ``request`` to another model. If it cannot be encoded, ``replied`` is called with the error."""
        self._queue.post(partial(self._write_request, call, request, replied))

    def free_blocks(self, offsets: list[int]) -> None:
        """Free the blocks at ``offsets`` in the arena of this side: the peer has released them."""
        self._queue.post(partial(self._free_blocks, offsets))

    def release(self) -> None:
        """Send the offsets in ``free`` to the peer, and clear it."""
        if not self.free:
            return
        offsets: list[int] = []
        with contextlib.suppress(IndexError):  # another thread may empty it at the same time
            while True:
                offsets.append(self.free.popleft())
        if offsets:
            self._aside.send(integers_frame(Kind.RELEASE, offsets))

    def _gather(self) -> None:
        assert self._gathered is not None
        while True:
            self._gathered.get()
            sleep(_GATHER_S)
            self._is_gathering = False  # before the queue is read: an answer that is added now wakes the thread again
            self._queue.post(self._write_late)

    def _write_late(self) -> None:
        while self._late:  # only this thread removes answers
            replies: list[Reply] = []
            size = 0
            while self._late:
                size += _bytes_of(self._late[0])
                if replies and size > _MAX_SHARED_BYTES:
                    break
                replies.append(self._late.popleft())
            self._write(replies, None)

    def _write(self, replies: list[Reply], times: Times | None) -> None:
        try:
            message = self._encoder.answers(replies) if times is None else self._done.answers(replies, times)
        except ValueError as error:
            remaining = self._write_singly(replies, error)
            if times is None and not remaining:
                return
            message = self._encoder.answers(remaining, times)
        self._answers.send(message)

    def _write_singly(self, replies: list[Reply], error: ValueError) -> list[Reply]:
        """Send each of ``replies``, which could not be encoded together, in its own message.

        Return the replies to send with the times of the batch: the error that replaces a single reply, else none.
        """
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

    def _free_blocks(self, offsets: list[int]) -> None:
        for offset in offsets:
            self._writer.release(offset)
        if self._writer.can_shrink and not self._is_shrinking:
            self._is_shrinking = True
            threading.Thread(target=self._shrink, name="headrace-shrink", daemon=True).start()

    def _shrink(self) -> None:
        """Return pages of the arena to the system once it has been unused for a while. Runs on its own thread."""
        while self._writer.can_shrink:
            sleep(IDLE_S)
            self._queue.post(self._writer.shrink)
        self._is_shrinking = False


def _bytes_of(reply: Reply) -> int:
    answer = reply.answer
    # An output that is not a tensor is refused when it is encoded.
    return sum(getattr(each, "nbytes", 0) for each in answer.outputs.values()) if type(answer) is InferResponse else 0


# ---------------------------------------------------------------------- an event loop


class FrameProtocol(asyncio.Protocol):
    """Calls ``receive`` with each complete frame, ``hung_up`` when the connection is closed, and ``broken`` with the
    error if ``receive`` raises or a frame is invalid."""

    def __init__(
        self, receive: Callable[[Frame], None], hung_up: Callable[[], None], broken: Callable[[Exception], None]
    ) -> None:
        self._receive, self._hung_up, self._broken = receive, hung_up, broken
        self._parser = FrameParser()

    def connection_lost(self, error: Exception | None) -> None:
        self._hung_up()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._parser.feed(data):
                self._receive(message)
        except Exception as error:
            self._broken(error)


async def connect(end: socket.socket, protocol: FrameProtocol) -> asyncio.WriteTransport:
    """Start to read ``end`` into ``protocol``. Return the transport that writes to it."""
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, sock=end)
    return transport


class Releases:
    """Collects the offsets in the peer's arena that this side no longer uses, and sends many in one message.

    ``soon`` schedules a call on the event loop, from any thread. ``send`` writes a frame. With another ``kind``, the
    numbers have the meaning of that kind.
    """

    def __init__(
        self,
        soon: Callable[[Callable[[], None]], object],
        send: Callable[[bytes], None],
        kind: Kind = Kind.RELEASE,
    ) -> None:
        self._soon, self._send, self._kind = soon, send, kind
        self._free: deque[int] = deque()
        self._is_scheduled = False

    def add(self, offset: int) -> None:
        """Release the tensor at ``offset``. Any thread; safe in a finalizer."""
        self._free.append(offset)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._soon(self._send_all)

    def _send_all(self) -> None:
        self._is_scheduled = False  # first, so that an offset added from here on is sent, too
        while self._free:
            offsets = [self._free.popleft() for _ in range(min(len(self._free), MAX_INTEGERS))]
            self._send(integers_frame(self._kind, offsets))


class ReleasedBlocks:
    """Frees the blocks of ``writer`` that the peer has released, and returns pages to the system when it is idle."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._is_waiting = False

    def receive(self, message: Frame) -> None:
        """Handle a RELEASE. Raises `ProtocolError`, and `ValueError` for an offset that is not in use."""
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
