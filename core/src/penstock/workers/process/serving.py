"""The child process: loads the instance it is ordered to, then runs batches until told to stop.

Imports nothing but the standard library, NumPy and those parts of Penstock that need no more. The
main thread runs batches; another reads what must be heard meanwhile.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from penstock.backends.base import AnyInstance, BaseInstance
from penstock.backends.services import LOG_LEVELS, LogLevel
from penstock.errors import Code, PenstockError, summary
from penstock.messages.request import InferRequest
from penstock.messages.response import Answer
from penstock.workers.batch import run_batch, runner_for
from penstock.workers.process.arena import Arena, Reader, Writer
from penstock.workers.process.direct import DirectCalls
from penstock.workers.process.line import Line
from penstock.workers.process.order import Order
from penstock.workers.process.outbox import Outbox
from penstock.workers.process.remote import RemoteServices
from penstock.workers.process.wire import notes
from penstock.workers.process.wire.answers import Reply, Status, Times, reply_of, unsendable
from penstock.workers.process.wire.codec import Decoder, Encoder
from penstock.workers.process.wire.frames import VERSION, Frame, Kind, integers_frame, read_integers
from penstock.workers.process.wire.requests import unsendable as unsendable_request
from penstock.workers.runner import LATER, Later, Runner

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Received(InferRequest):
    """A request under the number of its call."""

    call: int = 0


def serve(
    *,
    work: int,
    side: int,
    direct: int,
    inbound: int,
    outbound: int,
    obituary: int,
    arena_bytes: int,
    memory_bytes: int,
    log_level: int,
) -> NoReturn:
    """What `penstock.workers.process.bootstrap` calls, with inherited descriptors."""
    faulthandler.enable(obituary)
    faulthandler.register(signal.SIGUSR1, obituary)
    if memory_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    child = _Child(
        Line(work), Line(side), Line(direct), Arena.attach(inbound, arena_bytes), Arena.attach(outbound, arena_bytes)
    )
    for fd in (work, side, direct, inbound, outbound, obituary):
        os.set_inheritable(fd, False)  # what a model starts must not hold the server's end open
    os.register_at_fork(after_in_child=partial(_cut_off, work))
    threading.Thread(target=_until_death, args=(child.listen, obituary), name="penstock-side", daemon=True).start()
    _forward_log(child.services, log_level)
    _until_death(child.work, obituary)


def _cut_off(work: int) -> None:
    """In what a model has forked: it has no say in the batches. If it comes back from one, `Line` ends it."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, work, inheritable=False)
    os.close(null)


def _until_death(work: Callable[[], None], obituary: int) -> NoReturn:
    """Do ``work``, which only an error ends: that of the process, at once, whatever its threads do."""
    status = 1
    try:
        work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        os.write(obituary, traceback.format_exc().encode(errors="backslashreplace"))
    except BaseException:
        os.write(obituary, traceback.format_exc().encode(errors="backslashreplace"))
    os._exit(status)


class _Child:
    """One instance, and the two lines to its server."""

    def __init__(self, work: Line, side: Line, direct: Line, inbound: Arena, outbound: Arena) -> None:
        self._work, self._side = work, side
        self._outbox = Outbox()
        self._places = Writer(outbound)
        self._encoder = Encoder(self._places)
        self._free: deque[int] = deque()
        self._decoder = Decoder(Reader(inbound), self._free.append)
        self._open: dict[int, Received] = {}
        self._instance: AnyInstance
        self._name = self._version = ""
        self.services = RemoteServices(self._ask, side.send, DirectCalls(direct, self._decoder))

    # ------------------------------------------------------------------ main thread

    def work(self) -> NoReturn:
        frames = self._work.frames()
        runner = self._load(next(frames))
        for message in frames:
            if message.kind is Kind.RUN:
                self._run(runner, message)
            elif message.kind is Kind.STOP:
                self._stop()
        raise AssertionError("unreachable")

    def _load(self, message: Frame) -> Runner:
        try:
            order = Order.from_json(message.text, self.services)
            module, _, name = order.entry.partition(":")
            self._instance = getattr(import_module(module), name)(order)
            contract = order.contract()
            self._name, self._version = order.name, str(order.version)
            runner = runner_for(self._instance, contract)
        except BaseException as error:  # SystemExit of a model is a failure to load, too
            self._fail(error)
        runner.connect(self)
        checks = type(self._instance).is_ready is not BaseInstance.is_ready
        self._work.send(notes.json_frame(Kind.LOADED, {"has_check": checks, "version": VERSION}))
        return runner

    def _fail(self, error: BaseException) -> NoReturn:
        code = error.code if isinstance(error, PenstockError) else Code.INTERNAL
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._work.send(
            notes.json_frame(Kind.FAILED, {"message": summary(error), "code": code.value, "traceback": trace})
        )
        os._exit(1)

    def _run(self, runner: Runner, message: Frame) -> None:
        requests: list[Any] = self._decoder.requests(message, self._receive)
        for request in requests:
            self._open[request.call] = request
        answers, times = run_batch(runner, requests)
        replies = [_reply(request, answer) for request, answer in zip(requests, answers, strict=True)]
        for reply in replies:
            if reply.final:
                self._open.pop(reply.call, None)
        spans = Times(times.start_ns, times.input_end_ns, times.infer_end_ns, times.end_ns)
        self._send(replies, Kind.DONE, spans)
        del requests, answers, replies, message
        self._release()

    def _receive(self, call: int, caller: int, inputs: dict[str, Any]) -> Received:
        return Received(self._name, inputs, _nobody, model_version=self._version, call=call)

    def _stop(self) -> NoReturn:
        try:
            self._instance.close()
        except Exception:
            log.exception("an instance failed to close")
        os._exit(0)

    # ------------------------------------------------------------------ any thread

    def send(self, request: InferRequest, answer: Answer, final: bool) -> None:
        """The runner's outlet: what a batch did not answer."""
        assert isinstance(request, Received)
        if final:
            self._open.pop(request.call, None)
        self._send([reply_of(request.call, answer, final)], Kind.ANSWERS)
        self._release()

    def _send(self, replies: list[Reply], kind: Kind, times: Times | None = None) -> None:
        self._outbox.post(partial(self._write, replies, kind, times))

    def _write(self, replies: list[Reply], kind: Kind, times: Times | None) -> None:
        try:
            message = self._encoder.answers(kind, replies, times)
        except ValueError as error:
            message = self._encoder.answers(kind, self._apart(replies, error), times)
        self._work.send(message)

    def _apart(self, replies: list[Reply], error: ValueError) -> list[Reply]:
        """What remains to be sent of ``replies`` that cannot travel together."""
        if len(replies) == 1:
            return [unsendable(replies[0], error)]
        for reply in replies:
            if reply.status is not Status.LATER:
                self._write([reply], Kind.ANSWERS, None)
        return []

    def _ask(self, call: int, request: InferRequest) -> None:
        """Send a request to another model."""
        self._outbox.post(partial(self._write_request, call, request))

    def _write_request(self, call: int, request: InferRequest) -> None:
        try:
            message = self._encoder.requests(Kind.INFER, [(call, request)])
        except Exception as error:
            self.services.replied(reply_of(call, unsendable_request(error), True))
        else:
            self._side.send(message)

    def _take_back(self, offsets: list[int]) -> None:
        for offset in offsets:
            self._places.release(offset)

    def _release(self) -> None:
        """Tell the server which of its tensors nobody looks at any more."""
        if not self._free:
            return
        free: list[int] = []
        with contextlib.suppress(IndexError):  # another thread may be at it, too
            while True:
                free.append(self._free.popleft())
        if free:
            self._side.send(integers_frame(Kind.RELEASE, free))

    # ------------------------------------------------------------------ the other thread

    def listen(self) -> None:
        """Hear what cannot wait until the batch is done."""
        for message in self._side.frames():
            self._hear(message)
            self._release()

    def _hear(self, message: Frame) -> None:
        kind = message.kind
        if kind is Kind.REPLIES:
            for reply in self._decoder.answers(message):
                self.services.replied(reply)
        elif kind is Kind.RESULT:
            self.services.resolved(notes.read_json(message))
        elif kind is Kind.RELEASE:
            self._outbox.post(partial(self._take_back, read_integers(message)))
        elif kind is Kind.CANCEL:
            for request in map(self._open.get, read_integers(message)):
                if request is not None:
                    request.cancel()
        elif kind is Kind.READ:
            for request in map(self._open.get, read_integers(message)):
                if request is not None:
                    request.read()
        elif kind is Kind.CHECK:
            threading.Thread(target=self._check, name="penstock-check", daemon=True).start()

    def _check(self) -> None:
        """Ask the instance, on a thread of its own, whether it is ready."""
        try:
            ready, reason = bool(self._instance.is_ready()), ""
        except BaseException as error:  # SystemExit of a model is a no, too
            ready, reason = False, summary(error)
        self._side.send(notes.json_frame(Kind.CHECKED, {"ready": ready, "reason": reason}))


class _LogForwarder(logging.Handler):
    """Sends what this process logs to the server's log."""

    def __init__(self, services: RemoteServices) -> None:
        super().__init__()
        self._services = services

    def emit(self, record: logging.LogRecord) -> None:
        level: LogLevel = next((name for name, floor in LOG_LEVELS.items() if record.levelno >= floor), "verbose")
        self._services.log(level, self.format(record), record.pathname, record.lineno)


def _forward_log(services: RemoteServices, level: int) -> None:
    logger = logging.getLogger("penstock")
    logger.setLevel(level)
    logger.addHandler(_LogForwarder(services))
    logger.propagate = False


def _nobody(answer: Answer, final: bool) -> None:
    """Answers of a child leave through its runner."""


def _reply(request: Received, answer: Answer | Later) -> Reply:
    if answer is LATER:
        return Reply(request.call, Status.LATER, False, None)
    return reply_of(request.call, answer, True)
