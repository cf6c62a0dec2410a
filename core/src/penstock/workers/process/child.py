"""One life of a child process, as its server sees it: from launch to burial. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from penstock.backends.base import Isolation
from penstock.errors import Code, InternalError, LoadError, Unavailable
from penstock.messages.request import InferRequest
from penstock.messages.response import Answer
from penstock.workers.process.arena import Reader, Writer
from penstock.workers.process.desk import Desk
from penstock.workers.process.exits import ending
from penstock.workers.process.launching import Launched, launch
from penstock.workers.process.order import Order
from penstock.workers.process.wire import notes
from penstock.workers.process.wire.answers import Status, Times, read_times
from penstock.workers.process.wire.codec import Decoder, Encoder
from penstock.workers.process.wire.failure import WireError
from penstock.workers.process.wire.frames import VERSION, Frame, Frames, Kind, frame, integers_frame, read_integers

log = logging.getLogger(__name__)

#: How long what a child sent before it died may still arrive.
_LAST_READ_S = 0.05
#: How long a child may take to end when it has closed a line.
_LAST_BREATH_S = 0.25
_LAUNCHES = ThreadPoolExecutor(4, "penstock-launch")


class Owner(Protocol):
    """Whoever has a child: a `penstock.workers.process.host.ProcessHost`."""

    def batch_done(self, requests: Sequence[InferRequest], answers: Sequence[Answer], times: Times) -> None:
        """A batch has run. ``requests`` are those of it that have their last answer."""

    def answered(self, request: InferRequest, answer: Answer, final: bool) -> None:
        """An answer apart from its batch."""

    def child_died(self, child: Child, reason: str) -> None:
        """``child`` is dead and buried; what it had in flight is left in ``child.in_flight``."""


class Child:
    """Speaks with one process. ``in_flight`` maps the numbers of calls to requests."""

    def __init__(self, order: Order, isolation: Isolation, desk: Desk, owner: Owner) -> None:
        self.in_flight: dict[int, InferRequest] = {}
        self.has_check = False
        self.has_hung_up = False
        self.is_dead = False
        self.owner = owner
        self._order, self._isolation, self._desk = order, isolation, desk
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[bool] = self._loop.create_future()
        self._buried = asyncio.Event()
        self._checked: asyncio.Future[tuple[bool, str]] | None = None
        self._launched: Launched
        self._work: asyncio.WriteTransport
        self._side: asyncio.WriteTransport
        self._direct: asyncio.WriteTransport
        self._encoder: Encoder
        self._decoder: Decoder
        self._places: Writer
        self._calls = 0
        self._free: deque[int] = deque()
        self._read: list[int] = []
        self._is_releasing = False
        self._trouble = ""
        self._code: int | None = None
        self._words = ""
        self._is_open = self._is_stopping = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Launch the process and have it load its instance. Raises `LoadError`; then it is dead.

        Cancelled, it leaves no process behind either.
        """
        opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.shield(opening)
            await self._load()
        except BaseException:
            self._loaded.cancel()
            await opening
            await self.kill("is not needed")
            raise

    async def _open(self) -> None:
        """Start the process, and the lines to it."""
        name = self._order.instance_name
        # Not on the loop's own threads: those may all wait for models that are to be loaded in processes.
        self._launched = launched = await self._loop.run_in_executor(_LAUNCHES, launch, name, self._isolation)
        self._places = Writer(launched.inbound)
        self._encoder = Encoder(self._places)
        self._decoder = Decoder(Reader(launched.outbound), self._release)
        self._desk.open(self._encoder, self._decoder, self._send_aside, self.in_flight)
        self._work = await self._connect(launched.work, self._hear, self.hung_up)
        self._side = await self._connect(launched.side, self._hear, self._lost_line)
        self._direct = await self._connect(launched.direct, self._hear_direct, self._lost_line)
        threading.Thread(target=self._wait, name=f"penstock-wait-{name}", daemon=True).start()
        self._is_open = True

    async def _load(self) -> None:
        """Send the order, and wait until it is carried out. Raises `LoadError`."""
        name, isolation = self._order.instance_name, self._isolation
        self._work.write(frame(Kind.LOAD, 0, self._order.to_json()))
        timeout = isolation.start_timeout_s + isolation.load_timeout_s
        done, _ = await asyncio.wait((self._loaded,), timeout=timeout)
        if not done:
            self._launched.process.send_signal(signal.SIGUSR1)  # it writes where it is
            await asyncio.sleep(_LAST_READ_S)
            where = await asyncio.to_thread(self._launched.last_words)
            raise LoadError(f"model instance '{name}' did not load within {timeout:g} s\n{where}".rstrip())
        self.has_check = self._loaded.result()

    async def stop(self, grace_s: float) -> None:
        """Have the instance closed; kill the process if that takes longer than ``grace_s``."""
        self._is_stopping = True
        if not self.is_dead:
            self._work.write(frame(Kind.STOP, 0))
        try:
            await asyncio.wait_for(self._buried.wait(), grace_s)
        except asyncio.TimeoutError:
            log.warning("instance '%s' did not close within %g s and is killed", self._order.instance_name, grace_s)
            await self.kill("did not close in time")

    async def kill(self, why: str) -> None:
        """End the process now."""
        self._trouble = self._trouble or why
        self._launched.kill()
        await self._buried.wait()

    def stop_loading(self) -> None:
        """Nobody waits for the instance any more: `start` fails soon."""
        if self._is_open and not self._loaded.done():
            self._trouble = self._trouble or "was unloaded"
            self._launched.kill()

    def abandon(self) -> None:
        """End the process without waiting for it."""
        self._is_stopping = True
        if self._is_open and not self.is_dead:
            self._launched.kill()
            self._let_go()

    async def check(self) -> bool:
        """Whether the instance says that it is ready; raises `Unavailable` if it says why not."""
        if self._checked is None:
            self._checked = self._loop.create_future()
            self._send_aside(frame(Kind.CHECK, 0))
        ready, reason = await asyncio.shield(self._checked)
        if reason:
            raise Unavailable(reason)
        return ready

    def _wait(self) -> None:
        """On a thread: until the process has ended."""
        code = self._launched.wait()
        with self._launched.obituary:
            words = self._launched.last_words()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._ended, code, words)

    def _ended(self, code: int, words: str) -> None:
        """The process is gone; what it sent before is still to be read, unless it has been."""
        self._code, self._words = code, words
        if self.has_hung_up:
            self._bury(code)
        else:  # another process may hold the other end
            self._loop.call_later(_LAST_READ_S, self._bury, code)

    def hung_up(self) -> None:
        """Nothing more will come from the child."""
        self.has_hung_up = True
        if self._code is not None:
            self._bury(self._code)
        else:
            self._lost_line()

    def _lost_line(self) -> None:
        """A child that ends closes its lines first; one that lives on without them is of no use."""
        if self._code is None:
            self._loop.call_later(_LAST_BREATH_S, self._cut_off)

    def _cut_off(self) -> None:
        if self._code is None:
            self._trouble = self._trouble or "closed its line and was killed"
            self._launched.kill()

    def _bury(self, code: int) -> None:
        if self.is_dead:
            return
        words = self._words
        reason = f"model instance '{self._order.instance_name}' {self._trouble or ending(code)}"
        self._let_go()
        if self._checked is not None and not self._checked.done():
            self._checked.set_result((False, reason))
        if not self._loaded.done():
            self._loaded.set_exception(LoadError(f"{reason} while it was loading\n{words}".rstrip()))
        elif not self._is_stopping or self.in_flight:
            self.owner.child_died(self, f"{reason}\n{words}".rstrip())

    def _let_go(self) -> None:
        self.is_dead = True
        for line in (self._work, self._side, self._direct):
            line.abort()
        self._desk.close()
        self._launched.close()
        self._buried.set()

    # ------------------------------------------------------------------ to the child

    def run(self, batch: Sequence[InferRequest]) -> None:
        """Have a batch executed. Raises `PenstockError` if it cannot be sent."""
        numbered = []
        for request in batch:
            self._calls = call = self._calls + 1
            numbered.append((call, request))
        try:
            message = self._encoder.requests(Kind.RUN, numbered)
        except ValueError as error:
            raise InternalError(f"the batch cannot be sent to '{self._order.instance_name}': {error}") from error
        cancel = self._cancel
        for call, request in numbered:
            self.in_flight[call] = request
            request.on_cancel = cancel
        self._work.write(message)

    def _cancel(self, request: InferRequest) -> None:
        for call, other in self.in_flight.items():
            if other is request:
                self._send_aside(integers_frame(Kind.CANCEL, (call,)))
                return

    def _has_read(self, call: int, request: InferRequest) -> None:
        if not self._read:
            self._loop.call_soon(self._tell_reads)
        self._read.append(call)

    def _tell_reads(self) -> None:
        calls, self._read = self._read, []
        self._send_aside(integers_frame(Kind.READ, calls))

    def _release(self, offset: int) -> None:
        """Nobody looks at the child's tensor at ``offset`` any more. Any thread."""
        self._free.append(offset)
        if not self._is_releasing and not self.is_dead:
            self._is_releasing = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell_releases)

    def _tell_releases(self) -> None:
        self._is_releasing = False
        offsets = [self._free.popleft() for _ in range(min(len(self._free), 65535))]
        self._send_aside(integers_frame(Kind.RELEASE, offsets))

    def _send_aside(self, message: bytes) -> None:
        if not self.is_dead:
            self._side.write(message)

    # ------------------------------------------------------------------ from the child

    async def _connect(
        self, end: socket.socket, hear: Callable[[Frame], None], hung_up: Callable[[], None]
    ) -> asyncio.WriteTransport:
        transport, _ = await self._loop.create_connection(lambda: _Listener(self, hear, hung_up), sock=end)
        return transport

    def _hear_direct(self, message: Frame) -> None:
        self._desk.hear(message, self._send_direct)

    def _send_direct(self, message: bytes) -> None:
        if not self.is_dead:
            self._direct.write(message)

    def _hear(self, message: Frame) -> None:
        kind = message.kind
        if kind is Kind.DONE:
            self._done(message)
        elif kind is Kind.ANSWERS:
            self._answers(message)
        elif kind is Kind.RELEASE:
            for offset in read_integers(message):
                self._places.release(offset)
        elif kind is Kind.LOADED:
            found = notes.read_json(message)
            if found["version"] != VERSION:
                raise WireError(f"version {found['version']} of the schema, not {VERSION}")
            self._loaded.set_result(bool(found["has_check"]))
        elif kind is Kind.FAILED:
            found = notes.read_json(message)
            log.error("instance '%s' failed to load:\n%s", self._order.instance_name, found["traceback"].rstrip())
            self._loaded.set_exception(LoadError(found["message"], Code(found["code"])))
        elif kind is Kind.CHECKED:
            found = notes.read_json(message)
            checked, self._checked = self._checked, None
            if checked is not None:
                checked.set_result((bool(found["ready"]), str(found["reason"])))
        else:
            self._desk.hear(message, self._send_aside)

    def _done(self, message: Frame) -> None:
        replies = [reply for reply in self._decoder.answers(message) if reply.status is not Status.LATER]
        times = read_times(message)
        requests = [self.in_flight[reply.call] for reply in replies]
        if len(set(requests)) < len(requests):
            raise WireError("DONE: two answers to one request")
        for reply in replies:  # only now, so that nothing is lost in a message that makes no sense
            del self.in_flight[reply.call]
        self.owner.batch_done(requests, [reply.answer for reply in replies], times)

    def _answers(self, message: Frame) -> None:
        for reply in self._decoder.answers(message):
            request = self.in_flight[reply.call]
            if reply.final:
                del self.in_flight[reply.call]
            elif request.on_read is None:
                request.on_read = functools.partial(self._has_read, reply.call)
            self.owner.answered(request, reply.answer, reply.final)

    def broken(self, error: Exception) -> None:
        """The child has sent nonsense: it is beyond trust."""
        log.error("instance '%s' broke the protocol", self._order.instance_name, exc_info=error)
        self._trouble = self._trouble or "sent a malformed message and was killed"
        self._launched.kill()


class _Listener(asyncio.Protocol):
    """Receives from one socket; frames are handed on as they are complete."""

    def __init__(self, child: Child, hear: Callable[[Frame], None], hung_up: Callable[[], None]) -> None:
        self._child, self._hear, self._hung_up = child, hear, hung_up
        self._frames = Frames()

    def connection_lost(self, error: Exception | None) -> None:
        self._hung_up()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._hear(message)
        except Exception as error:
            self._child.broken(error)
