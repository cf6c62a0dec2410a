"""The server's end of a socket to a child, as far as it is read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from headrace.workers.process.wire.frames import Frame, Frames


class Receiver(asyncio.Protocol):
    """Hands on frames as they are complete. ``broken`` is told what ``hear`` raises, or nonsense on the line."""

    def __init__(
        self, hear: Callable[[Frame], None], hung_up: Callable[[], None], broken: Callable[[Exception], None]
    ) -> None:
        self._hear, self._hung_up, self._broken = hear, hung_up, broken
        self._frames = Frames()

    def connection_lost(self, error: Exception | None) -> None:
        self._hung_up()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._hear(message)
        except Exception as error:
            self._broken(error)


async def receive(end: socket.socket, receiver: Receiver) -> asyncio.WriteTransport:
    """Begin to read ``end``; returns what writes to it."""
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: receiver, sock=end)
    return transport
