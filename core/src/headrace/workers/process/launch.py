"""Starts a child process with its sockets and arenas. Blocks; called on a thread of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from headrace.backends.base import Isolation
from headrace.errors import LoadError
from headrace.ipc.arena import Arena
from headrace.telemetry import log_output
from headrace.workers.process import bootstrap
from headrace.workers.process.orphan_reaper import ORPHAN_REAPER

#: Address space of each arena; memory is taken as it is used.
ARENA_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class Launched:
    """A running child, as its parent holds it. ``work`` carries batches, ``side`` everything that
    must be read while a batch runs, ``direct`` one request to another model at a time, whose answer
    the asking thread reads itself; ``at_once`` is ``direct`` for threads that answer. The parent
    allocates in ``inbound`` and reads ``outbound``. ``crash_file`` is a file in which the child's fatal
    errors leave their traceback; the packages of the server are in ``folders``."""

    process: subprocess.Popen[bytes]
    work: socket.socket
    side: socket.socket
    direct: socket.socket
    at_once: socket.socket
    inbound: Arena
    outbound: Arena
    crash_file: IO[bytes]
    folders: Sequence[str]
    _reaping: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> int:
        """The exit code; whatever else the child's process group still runs is killed before."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        with self._reaping:
            code = self.process.wait()
        ORPHAN_REAPER.forget(self.process.pid)
        return code

    def kill(self) -> None:
        """End the child and all that it has started. Nothing once it is reaped: its number may be another's."""
        with self._reaping, contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)

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
    return Launched(process, work, side, direct, at_once, inbound, outbound, crash_file, _ours(isolation))


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
    entry = "headrace.workers.process.child_main:serve"
    try:
        return subprocess.Popen(
            child_command(isolation.python, entry, instance_name, isolation.packages, **arguments),
            pass_fds=tuple(fds.values()),
            stdin=None if sys.stdin is not None else subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **isolation.environ},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in a name
        reason = error.strerror if isinstance(error, OSError) else error
        raise LoadError(f"cannot run the interpreter '{isolation.python}' of '{instance_name}': {reason}") from error


def _ours(isolation: Isolation) -> Sequence[str]:
    """The folders of the packages that run the instance, each with its final slash."""
    found = _folders_of(("headrace", *isolation.packages))
    return [f"{folder}/{package}/" for package, folder in found.items()]


def child_command(python: str, entry: str, name: str, packages: Iterable[str], **arguments: Any) -> list[str]:
    """The command line with which the interpreter ``python`` calls ``entry``, ``module:function``, with ``arguments``
    as keywords. ``name`` is what ``ps`` shows. ``packages`` are those of this installation that another needs."""
    packed = {"packages": {} if python == sys.executable else _folders_of(packages)}
    return [python, str(bootstrap.__file__), name, json.dumps({"entry": entry, **arguments, **packed})]


def _folders_of(packages: Iterable[str]) -> Mapping[str, str]:
    """The folder of this installation in which each package lies; a name that is no package here is left out."""
    specs = ((package, importlib.util.find_spec(package)) for package in packages)
    return {name: str(Path(spec.origin).parents[1]) for name, spec in specs if spec is not None and spec.origin}
