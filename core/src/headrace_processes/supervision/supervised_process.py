"""A child process with one channel to its parent, in the parent: one run, from launch to exit.

`headrace_processes.supervision.parent_channel` is the child's end. Frames of `LifeKind` start, ping and drain the
process. A subclass defines the other frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import IO, Any, ClassVar

from anyio import get_cancelled_exc_class, to_thread

from headrace.errors import Code, HeadraceError, InternalError, LoadError, summary
from headrace_processes.ipc.channel import FrameProtocol, connect
from headrace_processes.ipc.framing import FIRST_OWN_KIND, Frame, ProtocolError, frame
from headrace_processes.ipc.json_parts import json_frame, read_json
from headrace_processes.supervision.child_process import ChildProcess, child_command, folders_of, run_child
from headrace_processes.supervision.exits import ExitWatcher, ending
from headrace_processes.supervision.heartbeat import DelayedCall, Heartbeat
from headrace_processes.supervision.orphan_reaper import ORPHAN_REAPER

log = logging.getLogger(__name__)


class LifeKind(IntEnum):
    """The frames about the lifecycle of a process, which every kind of process has."""

    START = FIRST_OWN_KIND  # to the process; JSON: its settings
    STARTED = FIRST_OWN_KIND + 1  # to the parent; JSON, empty: the process serves
    FAILED = FIRST_OWN_KIND + 2  # to the parent; JSON: code, message: the process cannot start
    DRAIN = FIRST_OWN_KIND + 3  # to the process: finish all requests, and exit
    PING = FIRST_OWN_KIND + 4  # to the process, which answers with PONG
    PONG = FIRST_OWN_KIND + 5  # to the parent


@dataclass(slots=True)
class LaunchedProcess(ChildProcess):
    """The running child of a `SupervisedProcess`, and the parent's end of its channel."""

    channel: socket.socket


def launch(name: str, entry: str, fds: Mapping[str, int], **arguments: Any) -> LaunchedProcess:
    """Start a process that calls ``entry``, a ``module:function``, and return it. Blocks.

    The function gets as keywords ``arguments`` and the inherited descriptors ``fds``, ``channel`` and ``crash_file``.
    Raises `LoadError` if the process cannot be started.
    """
    with contextlib.ExitStack() as ours:
        channel, theirs = socket.socketpair()
        ours.enter_context(channel)
        crash_file: IO[bytes] = ours.enter_context(tempfile.TemporaryFile())
        with theirs:
            inherited = {**fds, "channel": theirs.fileno(), "crash_file": crash_file.fileno()}
            command = child_command(sys.executable, entry, name, (), **inherited, **arguments)
            try:
                process = run_child(command, inherited.values(), {})
            except OSError as error:
                raise LoadError(f"cannot start {name}: {error.strerror}") from error
        ours.pop_all()
    ORPHAN_REAPER.watch(process.pid)
    return LaunchedProcess(process, crash_file, folders_of(()), channel)


class SupervisedProcess(ABC):
    """One run of a process. ``name`` is its name in the log and in ``ps``. Event loop only, except `launch`."""

    #: Once started, it is killed if it does not answer a ping for this many seconds; None for no limit.
    max_silent_s: ClassVar[int | None] = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.ended = asyncio.Event()
        #: How it ended, as a sentence. Its exit code: negative for a signal, None if it never ran.
        self.reason = ""
        self.exit_code: int | None = None
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._kill_reason = ""
        self._has_begun = self._serves = False
        self._launched: LaunchedProcess | None = None
        self._heartbeat: Heartbeat | None = None
        self._transport: asyncio.WriteTransport | None = None

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def launch(self) -> LaunchedProcess:
        """Start the process. Called on a thread; may block. Raises `LoadError`."""

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """Return the settings that the process receives first, as values that JSON can express."""

    def receive(self, message: Frame) -> None:
        """Handle a frame of `LifeKind`. A subclass handles the frames of other kinds. Raises `ProtocolError`."""
        if message.kind == LifeKind.STARTED:
            if not self._started.done():
                self._started.set_result(None)
        elif message.kind == LifeKind.FAILED:
            failure = read_json(message)
            if not self._started.done():
                self._started.set_exception(HeadraceError(failure["message"], Code(failure["code"])))
                self._started.exception()  # marks it as retrieved, in case no task awaits it any more
        elif message.kind == LifeKind.PONG:
            if self._heartbeat is not None:
                self._heartbeat.answered()
        else:
            raise ProtocolError(f"a process sends no frame of kind {message.kind}")

    def close(self) -> None:
        """End all pending calls, in both directions. Called once, when the process is dead."""

    # ------------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        """Launch the process; return once it has started. Raises `HeadraceError`; then it is dead, or about to exit.

        If a cancel scope ends during the launch, it takes effect after it. Call `drain` or `kill` then.
        """
        self._has_begun = True
        try:
            launched = await to_thread.run_sync(self.launch)
        except get_cancelled_exc_class():
            self._mark_dead("was not needed any more")
            raise
        except Exception as error:
            self._mark_dead(f"could not be launched: {summary(error)}")
            raise
        self._launched = launched
        if self._kill_reason:  # `kill` was called before the process was launched
            launched.kill()
        self._watcher = ExitWatcher(launched, self._end, partial(self.kill, "closed its channel and was killed"))
        self._watcher.begin(self.name)
        self._transport = await connect(launched.channel, FrameProtocol(self.receive, self._hung_up, self._broken))
        self.send(json_frame(LifeKind.START, self.settings()))
        await asyncio.shield(self._started)
        if self.max_silent_s is not None and not self.is_dead:
            ping = partial(self.send, frame(LifeKind.PING, 0))
            lost = partial(self.kill, f"has not answered for {self.max_silent_s} s and was killed")
            self._heartbeat = Heartbeat(self.call_later, ping, lost, self.max_silent_s)
        self._serves = True

    @property
    def has_started(self) -> bool:
        """True if `start` has returned and the process is not dead."""
        return self._serves and not self.is_dead

    @property
    def is_connected(self) -> bool:
        """True if frames can be sent to the process."""
        return self._transport is not None and not self.is_dead

    def send(self, message: bytes) -> None:
        """Send a frame. Do nothing if the channel is not open. It may close before the exit is detected."""
        transport = self._transport
        if transport is not None and not self.is_dead and not transport.is_closing():
            transport.write(message)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> DelayedCall:
        """Schedule ``call`` on the event loop in ``delay_s`` seconds."""
        return self._loop.call_later(delay_s, call)

    def drain(self) -> None:
        """Let the process finish its requests and exit."""
        if not self._has_begun:
            self._mark_dead("was not needed any more")
        elif self._transport is None:  # it is being launched, and has no requests
            self.kill("was not needed any more")
        self.send(frame(LifeKind.DRAIN, 0))

    def kill(self, reason: str) -> None:
        """Kill the process. ``reason`` becomes its `reason`, unless it was killed before for another one."""
        self._kill_reason = self._kill_reason or reason
        if self._launched is not None:
            self._launched.kill()

    # ------------------------------------------------------------------ exit

    def _hung_up(self) -> None:
        self._watcher.hung_up()

    def _broken(self, error: Exception) -> None:
        log.error("%s broke the protocol", self.name, exc_info=error)
        self.kill("sent a malformed message and was killed")

    def _end(self, code: int, report: str) -> None:
        if self.is_dead:
            return
        self.exit_code = code
        # Any other code means that the process exited by itself before the kill.
        exit_text = self._kill_reason if self._kill_reason and code == -signal.SIGKILL else ending(code)
        self._mark_dead(f"{exit_text}\n{report}".rstrip())
        if not self._started.done():
            self._started.set_exception(InternalError(f"{self.reason} while it was starting"))
            self._started.exception()  # marks it as retrieved, in case no task awaits it any more
        if self._transport is not None:
            self._transport.abort()

    def _mark_dead(self, exit_text: str) -> None:
        """Mark the process as dead. Its name and ``exit_text`` form the sentence `reason`."""
        self.is_dead, self.reason = True, f"{self.name} {exit_text}"
        if self._heartbeat is not None:
            self._heartbeat.end()
        self.close()
        self.ended.set()
