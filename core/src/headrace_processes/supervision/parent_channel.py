"""The child's end of the channel to its parent. The child exits when the parent does."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import traceback
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from headrace_processes.ipc.channel import FrameProtocol, connect
from headrace_processes.ipc.framing import Frame, ProtocolError, frame
from headrace_processes.ipc.json_parts import read_json
from headrace_processes.supervision.supervised_process import LifeKind


def run(main: Callable[[], int], channel: int, crash_file: int, fds: Collection[int] = ()) -> NoReturn:
    """Call ``main`` and exit the process with the status that it returns. An exception or a fatal error is written to
    ``crash_file``.

    SIGINT and SIGTERM are ignored: a service manager sends them to all processes of the server, and the parent then
    drains this one. Children of this process do not inherit ``channel``, ``crash_file`` and ``fds``. A descriptor of
    ``channel`` stays open until the process has exited: the parent kills a process that closes it and keeps running.
    """
    faulthandler.enable(crash_file)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for fd in (channel, crash_file, *fds):
        os.set_inheritable(fd, False)
    os.dup(channel)  # keeps the channel open: the other descriptor is closed with the event loop, before the exit
    status = 1
    try:
        status = main()
    except BaseException:
        os.write(crash_file, traceback.format_exc().encode(errors="backslashreplace"))
    os._exit(status)


class ParentChannel:
    """The channel to the parent. ``settings`` completes when the parent has sent them; ``draining`` is set when this
    process should finish its requests and exit. Event loop only."""

    def __init__(self) -> None:
        self.settings: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.draining = asyncio.Event()
        self._transport: asyncio.WriteTransport

    async def connect(self, channel: socket.socket) -> None:
        self._transport = await connect(channel, FrameProtocol(self.receive, _exit, _broken))

    def send(self, message: bytes) -> None:
        self._transport.write(message)

    def receive(self, message: Frame) -> None:
        """Handle a frame of `LifeKind`. A subclass handles the frames of other kinds. Raises `ProtocolError`."""
        if message.kind == LifeKind.START:
            self.settings.set_result(read_json(message))
        elif message.kind == LifeKind.DRAIN:
            self.draining.set()
        elif message.kind == LifeKind.PING:
            self.send(frame(LifeKind.PONG, 0))
        else:
            raise ProtocolError(f"a parent sends no frame of kind {message.kind}")


def _exit() -> NoReturn:
    """Exit at once: the parent has exited."""
    os._exit(0)


def _broken(error: Exception) -> NoReturn:
    """Exit with status 1 and a traceback: the parent has sent a malformed message."""
    traceback.print_exception(error)
    os._exit(1)
