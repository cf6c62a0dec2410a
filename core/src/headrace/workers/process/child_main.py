"""The child process: one instance, and the sockets to its server.

Imports nothing but the standard library, NumPy and those parts of Headrace that need no more. The
main thread is the `Executor`'s, another the `Listener`'s.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from headrace.errors import summary
from headrace.ipc.arena import Arena, Reader
from headrace.ipc.channel import FramedSocket, FrameSender
from headrace.ipc.codec import Decoder
from headrace.ipc.framing import Frame, Kind, read_integers
from headrace.ipc.json_parts import json_frame, read_json
from headrace.ipc.peer_requests import DirectCalls, OutgoingRequests, tell
from headrace.telemetry import log_output
from headrace.workers.process.executor import Executor
from headrace.workers.process.handshake import ChildKind
from headrace.workers.process.remote_services import RemoteServices, forward_log


def serve(
    *,
    work: int,
    side: int,
    direct: int,
    inbound: int,
    outbound: int,
    crash_file: int,
    arena_bytes: int,
    memory_bytes: int,
    busy_poll_us: int,
    log_level: int,
    prints_records: bool,
) -> NoReturn:
    """What `headrace.workers.process.bootstrap` calls, with inherited descriptors."""
    faulthandler.enable(crash_file)
    faulthandler.register(signal.SIGUSR1, crash_file)
    if prints_records:
        log_output.record_prints()
    if memory_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    work_channel, side_channel = FramedSocket(work, leave, busy_poll_us), FramedSocket(side, leave)
    arena = Arena.attach(inbound, arena_bytes)
    sender = FrameSender(work_channel, side_channel, Arena.attach(outbound, arena_bytes))
    decoder = Decoder(Reader(arena), sender.free.append)
    requests = OutgoingRequests(decoder, side_channel.send)
    direct_calls = DirectCalls(FramedSocket(direct, leave, busy_poll_us), decoder)
    services = RemoteServices(requests, sender, direct_calls, side_channel.send, work_channel.send)
    executor = Executor(work_channel, decoder, sender, services)
    listener = Listener(side_channel, requests, sender, services, executor)
    for fd in (work, side, direct, inbound, outbound, crash_file):
        os.set_inheritable(fd, False)  # what a model starts must not hold the server's end open
    os.register_at_fork(after_in_child=partial(_cut_off, work))
    threading.Thread(target=_until_error, args=(listener.listen, crash_file), name="headrace-side", daemon=True).start()
    forward_log(services, log_level)
    _until_error(executor.work, crash_file)


class Listener:
    """Reads ``side``: answers to what was asked, what became of requests, and whether the instance is ready.

    None of that can wait until the batch that runs is done: this is a thread of its own.
    """

    def __init__(
        self,
        side: FramedSocket,
        requests: OutgoingRequests,
        sender: FrameSender,
        services: RemoteServices,
        executor: Executor,
    ) -> None:
        self._side, self._requests, self._sender = side, requests, sender
        self._services, self._executor = services, executor

    def listen(self) -> None:
        """Until the server has gone."""
        for message in self._side.frames():
            self._hear(message)
            self._sender.release()

    def _hear(self, message: Frame) -> None:
        kind = message.kind
        if kind == Kind.ANSWERS:
            self._requests.hear(message)
        elif kind == Kind.RESULT:
            self._services.resolved(read_json(message))
        elif kind == Kind.RELEASE:
            self._sender.take_back(read_integers(message))
        elif kind == ChildKind.CHECK:
            threading.Thread(target=self._check, name="headrace-check", daemon=True).start()
        else:
            tell(message, self._executor.open)

    def _check(self) -> None:
        """Ask the instance, on a thread of its own, whether it is ready."""
        try:
            ready, reason = bool(self._executor.instance.is_ready()), ""
        except BaseException as error:  # SystemExit of a model is a no, too
            ready, reason = False, summary(error)
        self._side.send(json_frame(ChildKind.CHECKED, {"ready": ready, "reason": reason}))


def leave() -> NoReturn:
    """End the process at once, whatever its threads do: the server has gone, and nobody is there to be told."""
    os._exit(0)


def _cut_off(work: int) -> None:
    """In what a model has forked: it has no say in the batches. If it comes back from one, its socket ends it."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, work, inheritable=False)
    os.close(null)


def _until_error(work: Callable[[], None], crash_file: int) -> NoReturn:
    """Do ``work``, which only an error ends: that of the process, at once, whatever its threads do."""
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
