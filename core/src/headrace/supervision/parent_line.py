"""The end of the channel that a supervised process has: it hears from its parent, and does not outlive it."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import traceback
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from headrace.ipc.channel import FrameProtocol, connect
from headrace.ipc.framing import Frame, ProtocolError, frame
from headrace.ipc.json_parts import read_json
from headrace.supervision.supervised_process import LifeKind


def run(main: Callable[[], int], channel: int, crash_file: int, fds: Collection[int] = ()) -> NoReturn:
    """Exit with what ``main`` returns. What it raises, and fatal errors, go into ``crash_file``, which no child of this
    process inherits, nor ``channel`` and ``fds``. Signals that stop a server are the parent's to hear: whoever stops a
    group of processes tells all of them.

    Until the process is gone, its end of ``channel`` is open: one that closes it and lives on is killed."""
    faulthandler.enable(crash_file)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for fd in (channel, crash_file, *fds):
        os.set_inheritable(fd, False)
    os.dup(channel)  # its other descriptor is closed with the event loop, and what comes then may take a moment
    status = 1
    try:
        status = main()
    except BaseException:
        os.write(crash_file, traceback.format_exc().encode(errors="backslashreplace"))
    os._exit(status)


class ParentLine:
    """``told`` are the settings of this process, and ``draining`` is set when it is to end. Event loop only."""

    def __init__(self) -> None:
        self.told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.draining = asyncio.Event()
        self._transport: asyncio.WriteTransport

    async def connect(self, channel: socket.socket) -> None:
        self._transport = await connect(channel, FrameProtocol(self.hear, _leave, _broken))

    def send(self, message: bytes) -> None:
        self._transport.write(message)

    def hear(self, message: Frame) -> None:
        """Take a frame; those that are not of `LifeKind` are a subclass's. Raises `ProtocolError`."""
        if message.kind == LifeKind.START:
            self.told.set_result(read_json(message))
        elif message.kind == LifeKind.DRAIN:
            self.draining.set()
        elif message.kind == LifeKind.ASK:
            self.send(frame(LifeKind.THERE, 0))
        else:
            raise ProtocolError(f"a parent sends no frame of kind {message.kind}")


def _leave() -> NoReturn:
    """The parent has gone: nobody is left to answer."""
    os._exit(0)


def _broken(error: Exception) -> NoReturn:
    """What the parent says makes no sense; the next process may fare better."""
    traceback.print_exception(error)
    os._exit(1)
