"""A process that speaks with its parent over one channel, as the parent has it: one life, from its launch to its end.

`headrace.supervision.parent_line` is the other end. Frames of `LifeKind` are about that life; other frames are the
subclass's.
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

from headrace.errors import Code, HeadraceError, InternalError, LoadError, summary
from headrace.ipc.channel import FrameProtocol, connect
from headrace.ipc.framing import FIRST_OWN_KIND, Frame, ProtocolError, frame
from headrace.ipc.json_parts import json_frame, read_json
from headrace.supervision.child_process import ChildProcess, child_command, folders_of, run_child
from headrace.supervision.exits import ExitWatcher, ending
from headrace.supervision.heartbeat import DelayedCall, Heartbeat
from headrace.supervision.orphan_reaper import ORPHAN_REAPER

log = logging.getLogger(__name__)


class LifeKind(IntEnum):
    """What is said of the life of a process, whatever it does."""

    START = FIRST_OWN_KIND  # to the process; JSON: its settings
    STARTED = FIRST_OWN_KIND + 1  # JSON: nothing; it serves
    FAILED = FIRST_OWN_KIND + 2  # JSON: code, message; it cannot
    DRAIN = FIRST_OWN_KIND + 3  # to the process: answer what is there, and exit
    ASK = FIRST_OWN_KIND + 4  # to the process: is it there?
    THERE = FIRST_OWN_KIND + 5  # it is


@dataclass(slots=True)
class LaunchedProcess(ChildProcess):
    """A `SupervisedProcess` that runs, as the system has it."""

    channel: socket.socket


def launch(name: str, entry: str, fds: Mapping[str, int], **arguments: Any) -> LaunchedProcess:
    """A process that calls ``entry``, ``module:function``, with ``arguments``, with ``fds``, which it inherits, and
    with ``channel`` and ``crash_file``, descriptors as well. Blocks.

    Raises `LoadError` if it cannot be run.
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
    return LaunchedProcess(process, crash_file, folders_of(("headrace",)), channel)


class SupervisedProcess(ABC):
    """One life of a process. ``name`` is what the log and ``ps`` call it. Event loop only, but `launch`."""

    #: Once started, it is killed if it leaves a question unanswered for this many seconds; None for no limit.
    most_silent_s: ClassVar[int | None] = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.ended = asyncio.Event()
        #: What became of it, and the exit code, negative for a signal; None for one that never ran.
        self.reason = ""
        self.exit_code: int | None = None
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._trouble = ""
        self._has_begun = self._serves = False
        self._launched: LaunchedProcess | None = None
        self._heartbeat: Heartbeat | None = None
        self._transport: asyncio.WriteTransport | None = None

    # ------------------------------------------------------------------ what a kind of process adds

    @abstractmethod
    def launch(self) -> LaunchedProcess:
        """Launch it. Blocks; on a thread. Raises `LoadError`."""

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """What it is told first, as JSON."""

    def hear(self, message: Frame) -> None:
        """Take a frame; those that are not of `LifeKind` are a subclass's. Raises `ProtocolError`."""
        if message.kind == LifeKind.STARTED:
            if not self._started.done():
                self._started.set_result(None)
        elif message.kind == LifeKind.FAILED:
            found = read_json(message)
            if not self._started.done():
                self._started.set_exception(HeadraceError(found["message"], Code(found["code"])))
                self._started.exception()  # whoever waits for it may have gone
        elif message.kind == LifeKind.THERE:
            if self._heartbeat is not None:
                self._heartbeat.heard()
        else:
            raise ProtocolError(f"a process sends no frame of kind {message.kind}")

    def close(self) -> None:
        """It is dead, and nothing more will be heard of it: nobody waits for what it was asked, or has asked. Once."""

    # ------------------------------------------------------------------ its life

    async def start(self) -> None:
        """Returns once it has started. Raises `HeadraceError`; then it is dead, or about to die."""
        self._has_begun = True
        launching = asyncio.ensure_future(asyncio.to_thread(self.launch))
        try:
            launched = await asyncio.shield(launching)
        except asyncio.CancelledError:
            launched = await launching
            launched.kill()
            await asyncio.to_thread(launched.wait)
            self._bury("was not needed any more")
            raise
        except Exception as error:
            self._bury(f"could not be launched: {summary(error)}")
            raise
        self._launched = launched
        if self._trouble:  # it was condemned before it ran
            launched.kill()
        self._watcher = ExitWatcher(launched, self._end, partial(self.condemn, "closed its line and was killed"))
        self._watcher.begin(self.name)
        self._transport = await connect(launched.channel, FrameProtocol(self.hear, self._hung_up, self._broken))
        self.send(json_frame(LifeKind.START, self.settings()))
        await asyncio.shield(self._started)
        if self.most_silent_s is not None and not self.is_dead:
            ask = partial(self.send, frame(LifeKind.ASK, 0))
            lost = partial(self.condemn, f"has not answered for {self.most_silent_s} s and was killed")
            self._heartbeat = Heartbeat(self.call_later, ask, lost, self.most_silent_s)
        self._serves = True

    @property
    def has_started(self) -> bool:
        """Whether `start` has returned, and it lives."""
        return self._serves and not self.is_dead

    @property
    def is_connected(self) -> bool:
        """Whether what is sent can reach it."""
        return self._transport is not None and not self.is_dead

    def send(self, message: bytes) -> None:
        """Nothing where there is no line to it: not yet, or not any more, which is known before it has ended."""
        transport = self._transport
        if transport is not None and not self.is_dead and not transport.is_closing():
            transport.write(message)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> DelayedCall:
        """Have ``call`` made on the event loop in ``delay_s``."""
        return self._loop.call_later(delay_s, call)

    def drain(self) -> None:
        """Have it answer what it has, and exit."""
        if not self._has_begun:
            self._bury("was not needed any more")
        elif self._transport is None:  # it has just been launched, and nobody will ask it anything
            self.condemn("was not needed any more")
        self.send(frame(LifeKind.DRAIN, 0))

    def condemn(self, why: str) -> None:
        """Kill it; the first reason is the one that is told."""
        self._trouble = self._trouble or why
        if self._launched is not None:
            self._launched.kill()

    # ------------------------------------------------------------------ its end

    def _hung_up(self) -> None:
        # Nobody waits for what it has asked; what it has said before is heard.
        self._watcher.hung_up()

    def _broken(self, error: Exception) -> None:
        log.error("%s broke the protocol", self.name, exc_info=error)
        self.condemn("sent a malformed message and was killed")

    def _end(self, code: int, report: str) -> None:
        if self.is_dead:
            return
        self.exit_code = code
        # Whoever was about to end when it was to be killed has ended by itself.
        what = self._trouble if self._trouble and code == -signal.SIGKILL else ending(code)
        self._bury(f"{what}\n{report}".rstrip())
        if not self._started.done():
            self._started.set_exception(InternalError(f"{self.reason} while it was starting"))
            self._started.exception()  # whoever waits for it may have gone
        if self._transport is not None:
            self._transport.abort()

    def _bury(self, what: str) -> None:
        """It is dead: ``what`` completes the sentence that its name begins."""
        self.is_dead, self.reason = True, f"{self.name} {what}"
        if self._heartbeat is not None:
            self._heartbeat.end()
        self.close()
        self.ended.set()
