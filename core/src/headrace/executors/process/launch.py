"""Starts the child process of an instance with its sockets and arenas. Blocks; called on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from headrace.backends.base import Isolation
from headrace.errors import LoadError
from headrace.ipc.arena import Arena
from headrace.supervision.child_process import ChildProcess, child_command, folders_of, run_child
from headrace.supervision.orphan_reaper import ORPHAN_REAPER
from headrace.telemetry import log_output

#: Address space of each arena; memory is taken as it is used.
ARENA_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class Launched(ChildProcess):
    """The child of an instance, as its parent holds it. ``work`` carries batches, ``side`` everything that
    must be read while a batch runs, ``direct`` one request to another model at a time, whose answer
    the asking thread reads itself; ``at_once`` is ``direct`` for threads that answer. The parent
    allocates in ``inbound`` and reads ``outbound``."""

    work: socket.socket
    side: socket.socket
    direct: socket.socket
    at_once: socket.socket
    inbound: Arena
    outbound: Arena

    def close(self) -> None:
        """Let go of the arenas, whose views keep their memory. The crash file is its reader's to close."""
        self.inbound.close()
        self.outbound.close()


def launch(instance_name: str, isolation: Isolation) -> Launched:
    """A child that waits for its instance spec. Raises `LoadError` if the interpreter cannot be run."""
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:

        def channel() -> tuple[socket.socket, int]:
            """Our end, and the descriptor of the child's."""
            end, other = socket.socketpair()
            ours.enter_context(end)
            return end, theirs.enter_context(other).fileno()

        def arena() -> Arena:
            made = Arena.create(ARENA_BYTES)
            ours.callback(made.close)
            return made

        (work, their_work), (side, their_side), (direct, their_direct) = channel(), channel(), channel()
        at_once = ours.enter_context(direct.dup())  # here, where nothing runs yet that would be left behind
        at_once.setblocking(False)
        inbound, outbound = arena(), arena()
        crash_file: IO[bytes] = ours.enter_context(tempfile.TemporaryFile())
        fds = {
            "work": their_work,
            "side": their_side,
            "direct": their_direct,
            "inbound": inbound.fd,
            "outbound": outbound.fd,
            "crash_file": crash_file.fileno(),
        }
        process = _start(instance_name, isolation, fds)
        ours.pop_all()
    ORPHAN_REAPER.watch(process.pid)
    folders = folders_of(("headrace", *isolation.packages))
    return Launched(process, crash_file, folders, work, side, direct, at_once, inbound, outbound)


def _start(instance_name: str, isolation: Isolation, fds: Mapping[str, int]) -> subprocess.Popen[bytes]:
    """The process, which inherits ``fds``. Raises `LoadError`."""
    arguments = {
        **fds,
        "arena_bytes": ARENA_BYTES,
        "memory_bytes": isolation.memory_bytes,
        "busy_poll_us": isolation.busy_poll_us,
        "prints_records": log_output.prints_are_records(),
        "log_level": logging.getLogger("headrace").getEffectiveLevel(),
    }
    entry = "headrace.executors.process.child_main:serve"
    try:
        command = child_command(isolation.python, entry, instance_name, isolation.packages, **arguments)
        return run_child(command, fds.values(), isolation.environ)
    except (OSError, ValueError) as error:  # ValueError: a NUL in a name
        reason = error.strerror if isinstance(error, OSError) else error
        raise LoadError(f"cannot run the interpreter '{isolation.python}' of '{instance_name}': {reason}") from error
