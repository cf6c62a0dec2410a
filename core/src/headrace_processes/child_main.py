"""The child process: one instance, and the sockets to its server.

Imports only the standard library, NumPy and those parts of Headrace that need no more. The main thread runs
`BatchLoop`: it loads the instance and runs batches. Another thread runs `Listener`.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Final, NoReturn

from headrace.backends.base import AnyInstance, BaseInstance
from headrace.backends.services import Services
from headrace.errors import Code, HeadraceError, summary
from headrace.executors.instance import close_instance, run_batch, runner_for
from headrace.executors.runner import LATER, Later, Runner
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.telemetry import log_output
from headrace.telemetry.log_output import set_process_model
from headrace_processes.handshake import ChildKind, InstanceSpec
from headrace_processes.ipc.arena import Arena, Reader
from headrace_processes.ipc.batches import BatchReader
from headrace_processes.ipc.channel import FramedSocket, FrameSender
from headrace_processes.ipc.codec import Decoder, Encoder, ReceivedRequest
from headrace_processes.ipc.framing import VERSION, Frame, Kind, integers_frame, read_integers
from headrace_processes.ipc.json_parts import json_frame, read_json
from headrace_processes.ipc.mappings import ReceivedMappings, with_placed_outputs
from headrace_processes.ipc.peer_requests import Change, FastPathCalls, OutgoingRequests, change_of
from headrace_processes.ipc.replies import AnswerStatus, Reply, reply_of
from headrace_processes.remote_services import RemoteServices, forward_log

log = logging.getLogger(__name__)

#: If a process has more requests than this, late answers are gathered. A few callers would rather have each at once.
_FEW: Final = 3


def serve(
    *,
    work: int,
    side: int,
    direct: int,
    descriptors: int,
    inbound: int,
    outbound: int,
    crash_file: int,
    arena_bytes: int,
    memory_bytes: int,
    busy_poll_us: int,
    log_level: int,
    prints_records: bool,
    parts_of: Callable[[FramedSocket], ChildParts] | None = None,
) -> NoReturn:
    """Run the child. `headrace_processes.supervision.bootstrap` calls this, with inherited descriptors.
    ``parts_of`` gets the channel ``side`` and returns the parts; None for the default ones."""
    faulthandler.enable(crash_file)
    faulthandler.register(signal.SIGUSR1, crash_file)
    if prints_records:
        log_output.record_prints()
    if memory_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    work_channel, side_channel = FramedSocket(work, exit_now, busy_poll_us), FramedSocket(side, exit_now)
    inbound_arena, outbound_arena = Arena.attach(inbound, arena_bytes), Arena.attach(outbound, arena_bytes)
    mappings = ReceivedMappings(descriptors)
    direct_channel = FramedSocket(direct, exit_now, busy_poll_us)
    parts = ChildParts() if parts_of is None else parts_of(side_channel)
    sender = FrameSender(work_channel, side_channel, outbound_arena, parts.encoder)
    decoder = parts.decoder(Reader(inbound_arena), sender.free.append, mappings)
    requests = OutgoingRequests(decoder, side_channel.send)
    direct_calls = FastPathCalls(direct_channel, decoder)
    services = parts.services(requests, sender, direct_calls, side_channel.send, work_channel.send)
    batch_loop = parts.batch_loop(work_channel, decoder, sender, services, mappings)
    listener = parts.listener(side_channel, requests, sender, services, batch_loop)
    for fd in (work, side, direct, descriptors, inbound, outbound, crash_file):
        os.set_inheritable(fd, False)  # processes that the model starts must not hold the server's end open
    os.register_at_fork(after_in_child=partial(_detach_fork, work))
    threading.Thread(target=_run_forever, args=(listener.listen, crash_file), name="headrace-side", daemon=True).start()
    forward_log(services, log_level)
    _run_forever(batch_loop.work, crash_file)


class BatchLoop:
    """Loads the instance of a child and runs its batches. It is the `headrace.executors.runner.AnswerSink` of its
    runner.

    ``open``: the tickets of requests that have no last answer yet, by call number.
    """

    def __init__(
        self,
        work: FramedSocket,
        decoder: Decoder,
        sender: FrameSender,
        services: Services,
        mappings: ReceivedMappings,
    ) -> None:
        self.instance: AnyInstance
        self.open: dict[int, Ticket] = {}
        self._work, self._sender, self._services = work, sender, services
        self._mappings = mappings
        self._batches = BatchReader(decoder)
        self._spec: InstanceSpec | None = None
        #: The number of the last request that was received.
        self._last_call = 0
        #: Changes of requests that have not been received yet, by their numbers.
        self._early: dict[int, Change] = {}

    def work(self) -> NoReturn:
        """Execute the messages of the server until it sends CLOSE."""
        frames = self._work.frames()
        runner = self._load(next(frames))
        while True:  # no loop variable: it would keep the last message, perhaps a large one, until the next arrives
            self._run(runner, next(frames))

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        """Send an answer that is not part of a batch's result. Any thread."""
        request = ticket.request
        assert isinstance(request, ReceivedRequest)
        if final:
            self.open.pop(request.call, None)
        self._sender.answer_late(reply_of(request.call, answer, final), gather=len(self.open) > _FEW)
        self._sender.release()

    def change(self, message: Frame) -> None:
        """Cancel, stop or read the requests that ``message`` names. Called on the thread of the `Listener`.

        Batches arrive on another socket, so a request may be cancelled before it is received. Such a change is stored.
        """
        change = change_of(message)
        if change is None:
            return
        for call in read_integers(message):
            if call > self._last_call and message.kind != Kind.READ:
                self._early[call] = change
            if (ticket := self.open.get(call)) is not None:  # checked last: it may have been received meanwhile
                change(ticket)

    def _apply_early(self) -> None:
        """Apply the changes that arrived before their requests. To apply one twice is harmless."""
        for call in [call for call in list(self._early) if call <= self._last_call]:
            change = self._early.pop(call)
            if (ticket := self.open.get(call)) is not None:
                change(ticket)

    def _load(self, message: Frame) -> Runner:
        try:
            self._spec = spec = InstanceSpec.from_json(message.text, self._services)
            set_process_model(spec.name)
            module, _, name = spec.entry.partition(":")
            self.instance = getattr(import_module(module), name)(spec)
            schema = spec.schema()
            self._batches.model_name, self._batches.model_version = spec.name, str(spec.version)
        except BaseException as error:  # SystemExit of a model is a failure to load, too
            self._fail(error)
        try:
            runner = runner_for(self.instance, schema, spec.shaping())
        except BaseException as error:
            close_instance(self.instance, spec.instance_name)
            self._fail(error)
        runner.connect(self)
        # Objects created by loading live as long as the process. Frozen, they are not visited by garbage collections.
        gc.collect()
        gc.freeze()
        checks = type(self.instance).is_ready is not BaseInstance.is_ready
        details = self._load_details(runner)
        self._work.send(json_frame(ChildKind.LOADED, {"has_check": checks, "version": VERSION, **details}))
        return runner

    def _load_details(self, runner: Runner) -> Mapping[str, object]:
        """Return further fields of the LOADED message."""
        return {}

    def _fail(self, error: BaseException) -> NoReturn:
        code = error.code if isinstance(error, HeadraceError) else Code.INTERNAL
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._clean_up()
        failure = {"message": summary(error), "code": code.value, "traceback": trace}
        self._work.send(json_frame(ChildKind.FAILED, failure))
        log_output.flush_prints()
        os._exit(1)

    def _run(self, runner: Runner, message: Frame) -> None:
        if message.kind == ChildKind.CLOSE:
            self._close(runner)
        if message.kind == Kind.UNMAP:
            self._mappings.release(read_integers(message))
            return
        requests = self._batches.receive(message)
        if not requests:
            return
        tickets = [self._ticket(request) for request in requests]
        self._last_call = requests[-1].call
        if self._early:
            self._apply_early()
        self._work.is_reply_due = len(requests) == 1  # the callers of a large batch take longer to send again
        answers, times = run_batch(runner, tickets)
        replies = [self._reply(request, answer) for request, answer in zip(requests, answers, strict=True)]
        if lost := self._mappings.take_lost():
            self._work.send(integers_frame(Kind.LOST, lost))
        self._sender.answer(replies, times)
        del requests, tickets, answers, replies, message  # frees the tensors that only these variables reference
        self._sender.release()

    def _ticket(self, request: ReceivedRequest) -> Ticket:
        self.open[request.call] = ticket = Ticket(request, _ignore)
        ticket.rows, ticket.pinned = request.rows, request.pinned
        return ticket

    def _reply(self, request: ReceivedRequest, answer: Answer | Later) -> Reply:
        call = request.call
        if answer is LATER:
            return Reply(call, AnswerStatus.LATER, False, None)
        ticket = self.open.pop(call, None)
        if request.targets and isinstance(answer, InferResponse) and ticket is not None and not ticket.cancelled:
            answer = with_placed_outputs(answer, request.targets)
        return reply_of(call, answer, True)

    def _close(self, runner: Runner) -> NoReturn:
        assert self._spec is not None
        runner.close()
        close_instance(self.instance, self._spec.instance_name)
        self._sender.flush()
        self._clean_up()
        log_output.flush_prints()
        os._exit(0)

    def _clean_up(self) -> None:
        try:
            if self._spec is not None:
                self._spec.cleanup.close()
        except BaseException:
            log.exception("failed to release what the instance used")


def _ignore(answer: Answer, final: bool) -> None:
    """Do nothing: the runner sends the answers of a child."""


class Listener:
    """Reads the socket ``side`` on a thread of its own: its messages cannot wait for the running batch.

    They are answers to the model's own requests, changes of requests (cancelled, read), and readiness checks.
    """

    def __init__(
        self,
        side: FramedSocket,
        requests: OutgoingRequests,
        sender: FrameSender,
        services: RemoteServices,
        batch_loop: BatchLoop,
    ) -> None:
        self._side, self._requests, self._sender = side, requests, sender
        self._services, self._batch_loop = services, batch_loop

    def listen(self) -> None:
        """Handle messages until the server disconnects."""
        for message in self._side.frames():
            self._receive(message)
            self._sender.release()

    def _receive(self, message: Frame) -> None:
        kind = message.kind
        if kind == Kind.ANSWERS:
            self._requests.receive(message)
        elif kind == Kind.RESULT:
            self._services.resolved(read_json(message))
        elif kind == Kind.RELEASE:
            self._sender.free_blocks(read_integers(message))
        elif kind == ChildKind.CHECK:
            threading.Thread(target=self._check, name="headrace-check", daemon=True).start()
        else:
            self._batch_loop.change(message)

    def _check(self) -> None:
        """Call the instance's ``is_ready`` on a thread of its own, and send the result."""
        try:
            ready, reason = bool(self._batch_loop.instance.is_ready()), ""
        except BaseException as error:  # SystemExit of a model means not ready, too
            ready, reason = False, summary(error)
        self._side.send(json_frame(ChildKind.CHECKED, {"ready": ready, "reason": reason}))


@dataclass(frozen=True, slots=True)
class ChildParts:
    """The classes of the parts of a child. `headrace_processes.device_process` has those for a GPU."""

    encoder: type[Encoder] = Encoder
    decoder: Callable[[Reader, Callable[[int], None], ReceivedMappings], Decoder] = Decoder
    services: Callable[..., RemoteServices] = RemoteServices
    batch_loop: Callable[..., BatchLoop] = BatchLoop
    listener: Callable[..., Listener] = Listener


def exit_now() -> NoReturn:
    """Exit at once: the server has disconnected."""
    os._exit(0)


def _detach_fork(work: int) -> None:
    """Detach a process that the model has forked, so that it cannot run batches.

    If it returns from the model's code, it reads the end of its socket and exits.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, work, inheritable=False)
    os.close(null)


def _run_forever(work: Callable[[], None], crash_file: int) -> NoReturn:
    """Call ``work``, which returns only by an error. Then exit at once."""
    status = 1
    try:
        work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        os.write(crash_file, traceback.format_exc().encode(errors="backslashreplace"))
    except BaseException:
        os.write(crash_file, traceback.format_exc().encode(errors="backslashreplace"))
    log_output.flush_prints()
    os._exit(status)
