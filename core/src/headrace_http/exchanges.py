"""The unanswered request of one connection, and the writing half of the connection.

The answer is written whole or while it is made, no faster than the caller reads it. As in Triton, a connection has one
request at a time: the next one of a pipeline is taken when the caller has read the answer, except for what the
transport buffers. So one connection holds one request and one answer.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from headrace.frontends.access import host_of
from headrace_http.caller_limits import reset
from headrace_http.message import BEGINNING, JOIN_BYTES, Buffer, Cancel, HttpReply, serialise, stream_head
from headrace_http.request_head import RequestHead

#: From this size on, the parts of a reply are written one after the other. ``writelines`` of Python 3.11 joins them and
#: copies them twice more: 0.1 s for 32 MiB, during which no other request is served.
_JOINED_BYTES = 1 << 20


class Exchange:
    """One request and its answer. It is the ``reply`` for the handler; a second reply is ignored."""

    __slots__ = ("_protocol", "cancel", "closes", "head", "reply")

    def __init__(self, protocol: AnsweringProtocol, closes: bool, head: RequestHead) -> None:
        self.reply: HttpReply | None = None
        self.cancel: Cancel | None = None
        self.closes = closes
        self.head = head
        self._protocol = protocol

    @property
    def is_head(self) -> bool:
        """True if only the head of the answer is sent."""
        return self.head.method == "HEAD"

    @property
    def peer(self) -> str:
        """The address of the other end; empty if unknown."""
        return self._protocol.peer

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The verified certificate of the other end, as `ssl.SSLSocket.getpeercert` returns it; None without one."""
        return self._protocol.certificate

    def stream(self, head: HttpReply) -> ChunkedAnswer:
        """Start a streamed answer."""
        return self._protocol.begin_stream(self, head)

    def __call__(self, reply: HttpReply) -> None:
        if self.reply is None:
            self.reply = reply
            # It refers to this object through the request, whose tensors would stay until a garbage collection.
            self.cancel = None
            self._protocol.answered()


class ChunkedAnswer:
    """A streamed answer, in chunks (RFC 9112, 7.1). Event loop only.

    Waits for the caller. For HTTP/1.0, the end of the connection is the end of the answer. A task that waits here when
    the connection is lost is cancelled.
    """

    __slots__ = ("_exchange", "_head", "_is_plain", "_protocol", "_woken", "has_begun")

    def __init__(self, protocol: AnsweringProtocol, exchange: Exchange, head: HttpReply) -> None:
        self.has_begun = False
        self._protocol, self._exchange, self._head = protocol, exchange, head
        self._is_plain = not exchange.head.minor
        self._woken: asyncio.Future[None] | None = None

    async def send(self, chunk: Buffer) -> None:
        """Send ``chunk``. Return when more may be sent."""
        await self._turn()
        size, parts = len(chunk), [self._begin()]
        parts += (chunk,) if self._is_plain else (b"%x\r\n" % size, chunk, b"\r\n")
        self._protocol.write_stream([b"".join(parts)] if size <= JOIN_BYTES else [part for part in parts if part])
        await self._turn()

    async def end(self) -> None:
        await self._turn()
        last = b"" if self._is_plain or self._exchange.is_head else b"0\r\n\r\n"
        if rest := bytes(self._begin()) + last:
            self._protocol.write_stream([rest])
        self._protocol.end_stream(self._exchange)

    def break_off(self) -> None:
        """Close so that the caller can tell that the answer is incomplete."""
        self._protocol.break_off(is_plain=self._is_plain)

    def wake(self) -> None:
        """Let the task go on: the caller can read more."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def write_probe(self) -> None:
        """Write one harmless byte, a zero before the next chunk size: if the client has disconnected, the kernel
        answers with a reset."""
        if self.has_begun and not self._is_plain:
            self._protocol.write_stream([b"0"])

    async def _turn(self) -> None:
        while not self._protocol.may_stream(self._exchange):
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken

    def _begin(self) -> Buffer:
        if self.has_begun:
            return b""
        self.has_begun = True
        return stream_head(self._head, self._exchange.closes, is_chunked=not self._is_plain)


class AnsweringProtocol(asyncio.BufferedProtocol):
    """The writing half of a connection. The subclass is the reading half."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._stream: ChunkedAnswer | None = None  # its answer, if that is streamed
        self._streamed_bytes = 0
        self._request_bytes = 0  # counted only if it is large
        self._answer_bytes = 0  # of the answer that is being sent, or of its last chunk, if it is large
        self._is_reading = True
        self._is_writable = True
        self._has_begun = False  # the first bytes of the next answer are written

    # ------------------------------------------------------------------ calls of the reading half

    @abstractmethod
    def _go_on(self) -> None:
        """Read on after an answer was taken."""

    @abstractmethod
    def _read_no_more(self) -> None:
        """Drop the received part of a request, and everything after it."""

    @abstractmethod
    def _hold(self, request_bytes: int) -> None:
        """Record how many bytes of the request are held."""

    @abstractmethod
    def _wrote(self) -> None:
        """Record the answer to a large request, or a large answer, which is written, instead of the request."""

    @abstractmethod
    def _end(self) -> None:
        """Close the connection: the last answer is written."""

    # ------------------------------------------------------------------ answers

    @cached_property
    def peer(self) -> str:
        """The address of the other end; empty if unknown."""
        return host_of(self._transport.get_extra_info("peername"))

    @cached_property
    def certificate(self) -> Mapping[str, Any] | None:
        """The verified certificate of the other end; None without one."""
        return self._transport.get_extra_info("peercert") or None

    def answered(self) -> None:
        """Write the reply, if there is one and the caller reads, and go on."""
        exchange = self._exchange
        if exchange is not None and self._is_writable:
            reply = exchange.reply
            if reply is not None:
                self._exchange = None
                buffers = serialise(reply, exchange.closes, exchange.head.method == "HEAD")
                if self._has_begun:
                    self._has_begun = False
                    buffers[0] = buffers[0][len(BEGINNING) :]
                if len(buffers) == 1:
                    self._transport.write(buffers[0])
                else:
                    self._write_parts(buffers)
                    self._wrote()
                if self._request_bytes:
                    self._wrote()
                if exchange.closes:
                    self._end()
                    return
            elif self._stream is not None:
                self._stream.wake()
        if not self._is_reading:
            self._go_on()

    def _write_parts(self, buffers: list[Buffer]) -> None:
        self._answer_bytes = sum(map(len, buffers))
        if self._answer_bytes < _JOINED_BYTES:
            self._transport.writelines(buffers)
        else:
            for buffer in buffers:
                self._transport.write(buffer)

    def _provoke(self) -> None:
        """Write the first bytes of the answer: if the client has disconnected, its kernel answers with a reset."""
        if self._is_writable and not self._has_begun:
            if self._stream is not None and self._stream.has_begun:
                self._stream.write_probe()
            else:
                self._has_begun = True
                self._transport.write(BEGINNING)

    def _cancel(self) -> None:
        """Cancel the request: the caller has disconnected."""
        exchange, self._exchange, self._stream = self._exchange, None, None
        if exchange is not None and exchange.cancel is not None and exchange.reply is None:
            exchange.cancel()

    # ------------------------------------------------------------------ answers in pieces

    def begin_stream(self, exchange: Exchange, head: HttpReply) -> ChunkedAnswer:
        """Start a streamed answer to ``exchange``."""
        self._stream = stream = ChunkedAnswer(self, exchange, head)
        return stream

    def may_stream(self, exchange: Exchange) -> bool:
        """True if a chunk of the answer to ``exchange`` may be written now."""
        return self._is_writable and self._exchange is exchange

    def write_stream(self, buffers: Sequence[Buffer]) -> None:
        self._answer_bytes = 0
        for buffer in buffers:
            self._streamed_bytes += len(buffer)
            if len(buffer) > JOIN_BYTES:
                self._answer_bytes = len(buffer)
            if self._has_begun:
                self._has_begun = False
                buffer = buffer[len(BEGINNING) :]
            self._transport.write(buffer)

    def end_stream(self, exchange: Exchange) -> None:
        """Finish ``exchange``, whose answer is complete."""
        self._exchange = self._stream = exchange.cancel = None
        self._hold(0)
        if exchange.closes:
            self._end()
        else:
            self.answered()

    def break_off(self, *, is_plain: bool) -> None:
        """Close after the written part of an incomplete answer."""
        self._read_no_more()
        if is_plain:  # a normal close would look like the end of the answer
            reset(self._transport)
        else:
            self._transport.close()
