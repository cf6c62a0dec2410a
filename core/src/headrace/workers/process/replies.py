"""The server's end of the line on which a child asks another model for one thing at a time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from headrace.messages.response import InferResponse
from headrace.workers.process.wire.answers import reply_of
from headrace.workers.process.wire.codec import Encoder
from headrace.workers.process.wire.frames import Kind
from headrace.workers.process.wire.tensors import INLINE


class DirectReplies:
    """Writes answers: on the event loop to ``transport``, or at once, on the thread that has one, to ``end``.

    ``end`` is the same socket, but its descriptor, which does not block, is ours to close.
    The loop would have to be woken for it first, which costs as much as the asker's own waking.
    """

    def __init__(self, transport: asyncio.WriteTransport, end: socket.socket) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._encoder = Encoder(None)
        self._end = end
        self._turn = threading.Lock()  # while nothing is done that could run a finalizer: the loop waits for it, too

    def send(self, message: bytes) -> None:
        """Event loop only."""
        self._transport.write(message)

    def send_at_once(self, call: int, response: InferResponse) -> bool:
        """Any thread. False if the loop has to do it: the response is large, or cannot be sent as it is."""
        if any(tensor.nbytes >= INLINE for tensor in response.outputs.values()):
            return False
        try:
            message = self._encoder.answers(Kind.REPLIES, [reply_of(call, response, True)])
            with self._turn:
                sent = self._end.send(message)
        except (ValueError, OSError):  # OSError: the child does not read, or has gone
            return False
        if sent < len(message):
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the child with it
                self._loop.call_soon_threadsafe(self.send, message[sent:])
        return True

    def close(self) -> None:
        """Nothing is sent any more."""
        with self._turn:
            self._end.close()
        self._transport.abort()
