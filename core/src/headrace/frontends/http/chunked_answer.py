"""An answer of the native host that is written while it is made, in chunks (RFC 9112, 7.1)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.frontends.http.message import Buffer, HttpReply
from headrace.frontends.http.writing import JOIN_BYTES, stream_head

if TYPE_CHECKING:
    from headrace.frontends.http.exchange import Exchange
    from headrace.frontends.http.protocol import HttpProtocol


class ChunkedAnswer:
    """Waits for the answers before it on the connection, and then for the caller. Event loop only.

    To callers of HTTP/1.0 the end of the connection is the end of the answer. Who waits in it when the connection is
    lost is cancelled.
    """

    __slots__ = ("_exchange", "_head", "_is_plain", "_protocol", "_woken", "has_begun")

    def __init__(self, protocol: HttpProtocol, exchange: Exchange, head: HttpReply) -> None:
        self.has_begun = False
        self._protocol, self._exchange, self._head = protocol, exchange, head
        self._is_plain = not exchange.head.minor
        self._woken: asyncio.Future[None] | None = None

    async def send(self, chunk: Buffer) -> None:
        """Return once more may be sent."""
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
        """End, so that the caller can tell that it is not the end."""
        self._protocol.break_off(is_plain=self._is_plain)

    def wake(self) -> None:
        """Its turn may have come."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def provoke(self) -> None:
        """Write what changes nothing, and what whoever has gone answers with a reset: a zero before the next size."""
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
