"""The child's end of a socket: frames in, one after the other, and frames out from any thread."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import NoReturn

from headrace.workers.process.wire.frames import Frame, Frames

_RECEIVE_BYTES = 256 * 1024


class Line:
    """One of the sockets. The end of the input is the end of the process: the server has gone."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._frames = Frames(writable=True)
        self._waiting: deque[bytes] = deque()
        self._is_sending = False
        self._turn = threading.RLock()

    def frames(self) -> Iterator[Frame]:
        """Every frame, as it comes, in a buffer of its own."""
        # One buffer for all: `recv` would map fresh pages for each message, which costs more than the message.
        buffer = memoryview(bytearray(_RECEIVE_BYTES))
        while True:
            try:
                received = self._receive(buffer)
            except OSError as error:
                _raise_a_handlers(error)
                received = 0
            if not received:
                leave()
            yield from self._frames.feed(bytearray(buffer[:received]))

    def _receive(self, buffer: memoryview) -> int:
        """Wait for bytes; returns how many."""
        return self._socket.recv_into(buffer)

    def send(self, message: bytes) -> None:
        """Write a frame. Blocks while the server does not read.

        A finalizer, or the handler of a signal, may call it in the middle of a call of the same
        thread, which then writes that frame, too.
        """
        with self._turn:
            self._waiting.append(message)
            if self._is_sending:
                return
            while self._waiting:  # looked at again after each round: a frame may come as it ends
                self._is_sending = True
                try:
                    self._write_waiting()
                finally:  # the handler of a signal may raise. What of a frame that cuts off, the server will notice
                    self._is_sending = False

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._socket.sendall(self._waiting.popleft())
        except OSError as error:
            _raise_a_handlers(error)
            leave()


def _raise_a_handlers(error: OSError) -> None:
    """Raise what the handler of a signal has raised, as a ``TimeoutError``; what the system says has a number."""
    if error.errno is None:
        raise error


def leave() -> NoReturn:
    """End the process at once, whatever its threads do: nobody is there to be told anything."""
    os._exit(0)
