"""Start the child process of an instance with its sockets and arenas. Blocks; called on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from headrace.backends.base import Isolation
from headrace.errors import LoadError
from headrace.telemetry import log_output
from headrace_processes.ipc.arena import Arena
from headrace_processes.supervision.child_process import ChildProcess, child_command, folders_of, run_child
from headrace_processes.supervision.orphan_reaper import ORPHAN_REAPER

#: Address space of each arena: 256 MiB. Memory is allocated on use.
ARENA_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class LaunchedChild(ChildProcess):
    """The child of an instance, on its parent's side.

    | Field | Use |
    |---|---|
    | ``work`` | socket for batches |
    | ``side`` | socket for everything that must be read while a batch runs |
    | ``direct`` | socket for one request at a time to another model; the calling thread reads the answer itself |
    | ``direct_at_once`` | a second descriptor of ``direct``, for threads that send answers |
    | ``descriptors`` | socket for the descriptors of client memory |
    | ``inbound`` | arena in which the parent allocates |
    | ``outbound`` | arena that the parent reads |
    """

    work: socket.socket
    side: socket.socket
    direct: socket.socket
    direct_at_once: socket.socket
    descriptors: socket.socket
    inbound: Arena
    outbound: Arena

    def close(self) -> None:
        """Close the arenas and ``descriptors``. Views keep their memory. `ExitWatcher` closes the crash file."""
        self.descriptors.close()
        self.inbound.close()
        self.outbound.close()


def launch(instance_name: str, isolation: Isolation, gpus: Sequence[str] = ()) -> LaunchedChild:
    """Start a child that waits for its instance spec. ``gpus`` are the UUIDs of the GPUs on which the server can read
    the child's tensors. Raises `LoadError` if the interpreter cannot be run."""
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:

        def channel() -> tuple[socket.socket, int]:
            """Return the parent's end, and the descriptor of the child's end."""
            end, other = socket.socketpair()
            ours.enter_context(end)
            return end, theirs.enter_context(other).fileno()

        def arena() -> Arena:
            created = Arena.create(ARENA_BYTES)
            ours.callback(created.close)
            return created

        (work, their_work), (side, their_side), (direct, their_direct) = channel(), channel(), channel()
        descriptors, their_descriptors = channel()
        direct_at_once = ours.enter_context(direct.dup())  # created here, where a failure leaves no process behind
        direct_at_once.setblocking(False)
        inbound, outbound = arena(), arena()
        crash_file: IO[bytes] = ours.enter_context(tempfile.TemporaryFile())
        fds = {
            "work": their_work,
            "side": their_side,
            "direct": their_direct,
            "descriptors": their_descriptors,
            "inbound": inbound.fd,
            "outbound": outbound.fd,
            "crash_file": crash_file.fileno(),
        }
        process = _start(instance_name, isolation, fds, gpus)
        ours.pop_all()
    ORPHAN_REAPER.watch(process.pid)
    folders = folders_of(isolation.packages)
    return LaunchedChild(
        process, crash_file, folders, work, side, direct, direct_at_once, descriptors, inbound, outbound
    )


def _start(
    instance_name: str, isolation: Isolation, fds: Mapping[str, int], gpus: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the process, which inherits ``fds``. Raises `LoadError`."""
    arguments: dict[str, Any] = {
        **fds,
        "arena_bytes": ARENA_BYTES,
        "memory_bytes": isolation.memory_bytes,
        "busy_poll_us": isolation.busy_poll_us,
        "prints_records": log_output.prints_are_records(),
        "log_level": logging.getLogger("headrace").getEffectiveLevel(),
    }
    if gpus:
        arguments["gpus"] = gpus
    entry = f"headrace_processes.{'device_process' if gpus else 'child_main'}:serve"
    try:
        command = child_command(isolation.python, entry, instance_name, isolation.packages, **arguments)
        return run_child(command, fds.values(), isolation.environ)
    except (OSError, ValueError) as error:  # ValueError: a NUL in a name
        reason = error.strerror if isinstance(error, OSError) else error
        raise LoadError(f"cannot run the interpreter '{isolation.python}' of '{instance_name}': {reason}") from error
