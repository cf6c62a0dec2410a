"""The child process: one instance, and the lines to its server.

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

from headrace.telemetry import prints
from headrace.workers.process.arena import Arena, Reader
from headrace.workers.process.awake import AwakeLine
from headrace.workers.process.direct import DirectCalls
from headrace.workers.process.executor import Executor
from headrace.workers.process.forwarding import forward_log
from headrace.workers.process.line import Line
from headrace.workers.process.listening import Listener
from headrace.workers.process.remote import RemoteServices
from headrace.workers.process.sending import Sender
from headrace.workers.process.wire.codec import Decoder


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
    busy_poll_us: int,
    log_level: int,
    prints_records: bool,
) -> NoReturn:
    """What `headrace.workers.process.bootstrap` calls, with inherited descriptors."""
    faulthandler.enable(obituary)
    faulthandler.register(signal.SIGUSR1, obituary)
    if prints_records:
        prints.install()
    if memory_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    work_line, side_line = AwakeLine(work, busy_poll_us), Line(side)
    arena = Arena.attach(inbound, arena_bytes)
    sender = Sender(work_line, side_line, Arena.attach(outbound, arena_bytes))
    decoder = Decoder(Reader(arena), sender.free.append)
    direct_calls = DirectCalls(AwakeLine(direct, busy_poll_us), decoder)
    services = RemoteServices(sender.ask, side_line.send, work_line.send, direct_calls)
    executor = Executor(work_line, decoder, sender, services)
    listener = Listener(side_line, decoder, sender, services, executor)
    for fd in (work, side, direct, inbound, outbound, obituary):
        os.set_inheritable(fd, False)  # what a model starts must not hold the server's end open
    os.register_at_fork(after_in_child=partial(_cut_off, work))
    threading.Thread(target=_until_death, args=(listener.listen, obituary), name="headrace-side", daemon=True).start()
    forward_log(services, log_level)
    _until_death(executor.work, obituary)


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
    prints.flush()
    os._exit(status)
