"""A connection of hypercorn: what it reads is held to the grammar of `parse_head`, and its caller to a minimum rate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol, TypeAlias, cast

from headrace import HeadraceError, HttpReply, InvalidArgument, OpenConnections, StallTimer, StrictRequests
from headrace_hypercorn.http2_frames import FrameReader, FrameTurns
from headrace_hypercorn.sockets import has_left, reset, unsent_bytes

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: What every answer of HTTP/1.1 begins with.
_BEGINNING = b"HTTP/1.1 "
_LATE = InvalidArgument("the request did not arrive in time")
#: Bodies are handed on in pieces of so many bytes, so that it shows whether the caller takes them.
_PIECE_BYTES = 256 * 1024


class App(Protocol):
    """The application of `create_app`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...
    def refusal(self, error: HeadraceError, status: int, scope: Scope) -> HttpReply: ...


class _Late(Exception):
    """The body of a request did not arrive in time."""


class _BrokenBody(Exception):
    """The body of a request breaks the rules of HTTP."""


class HypercornConnection(asyncio.StreamReaderProtocol):
    """One connection, which ``serve`` serves when it is given its reader and its writer."""

    def __init__(
        self,
        connections: OpenConnections,
        socket_limit: Callable[[str], int],
        turns: FrameTurns,
        serve: Callable[[HypercornConnection, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._reader = FrameReader(loop, turns)
        super().__init__(self._reader, self._serve, loop)
        self._connections, self._serve_by = connections, serve
        self._requests = StrictRequests(connections.limits, socket_limit)
        self._socket_transport: asyncio.Transport
        self._calls: set[_TimedCall] = set()
        #: The tasks of hypercorn in which requests are answered.
        self.tasks: set[asyncio.Task[None]] = set()
        self._answered = 0
        self._has_eof = False
        self._was_arriving = True
        self._seconds = self._closing_s = 0
        self.is_stopping = False
        #: Set when no further request will come.
        self.ended = asyncio.Event()
        #: Set when nothing more can be answered either.
        self.lost = asyncio.Event()

    # ------------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket_transport = cast("asyncio.Transport", transport)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        #: What the client proved itself with, as ``ssl.SSLSocket.getpeercert`` returns it.
        self._certificate = transport.get_extra_info("peercert") or None
        if not self._connections.add(self):
            self._socket_transport.abort()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self.ended.set()
        self.lost.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._has_eof and (passed := self._requests.pass_on(data)):
            if self._requests.is_http_2:
                self._reader.transport = self._socket_transport
            super().data_received(passed)
        if self._requests.refusal is not None and self._answered == self._requests.whole:
            for call in self._calls:
                call.break_off()
        if (frames := self._requests.frames) is not None and frames.is_too_large:
            for call in self._calls:
                call.too_large.set()

    def eof_received(self) -> bool | None:
        """hypercorn would take it for a caller who has gone, so that it hears of it when all is answered."""
        self._has_eof = True
        if (
            self._is_tls
            or self._requests.is_http_2
            or self._requests.frames is not None
            or self._answered >= self._requests.whole
        ):
            self.ended.set()  # TLS has no connection that is closed on one side
            return super().eof_received()
        calls = tuple(self._calls)
        if calls and not any(call.has_begun for call in calls):
            self._writer.begin()
        elif any(call.is_chunked and not call.is_waiting for call in calls):
            self._socket_transport.write(b"0")  # the same, in front of the size of the next chunk
        self._connections.watch_for_reset(self)
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._socket_transport.is_closing():
            return
        self._writer = _Writer(self._socket_transport, self, reader, asyncio.get_running_loop())
        await self._serve_by(self, reader, self._writer)

    # ------------------------------------------------------------------ the application calls

    async def answer(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Let ``app`` answer one request."""
        if self._certificate is not None:
            own = {"headrace": {"certificate": self._certificate}}
            scope = {**scope, "extensions": {**(scope.get("extensions") or {}), **own}}
        call = _TimedCall(self, self._connections.limits.stall_timer(), scope, receive, send)
        self._calls.add(call)
        if self._has_eof:  # it came with the request, or behind one before it
            self._writer.begin()
        try:
            if self._requests.refusal is not None and self._answered == self._requests.whole:
                raise _BrokenBody
            await app(scope, call.receive, call.send)
        except _BrokenBody:
            refusal = self._requests.refusal
            assert refusal is not None
            await call.refuse(app.refusal(refusal.error, refusal.status, scope))
        except _Late:
            await call.refuse(app.refusal(_LATE, 408, scope))
        except Exception:
            if call.has_begun and call.version == "1.0":  # an end would be the end of the answer
                reset(self._socket_transport)
            raise
        finally:
            self._calls.discard(call)
            self._answered += 1
            self._reader.counter.answered()
            self._seconds = 0
            if self._has_eof and self._answered >= self._requests.whole:
                self.ended.set()
                super().eof_received()
            if self.is_stopping:
                self._connections.settle()

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes that wait for the caller, or 0 if the system has room for all of them.

        An event stream writes a little now and then. The system may hold some of that all the time, because
        the caller acknowledges it late, and this alone does not make the caller slow.
        """
        waiting = self._socket_transport.get_write_buffer_size()
        return waiting and waiting + unsent_bytes(self._socket_transport.get_extra_info("socket"))

    # ------------------------------------------------------------------ the host calls

    @property
    def is_http_2(self) -> bool:
        return self._requests.is_http_2

    @property
    def is_idle(self) -> bool:
        requests = self._requests
        return not self._calls and not requests.is_arriving and (requests.is_http_2 or self._answered >= requests.whole)

    @property
    def idle_seconds(self) -> int:
        return self._seconds

    @property
    def has_left(self) -> bool:
        transport = self._socket_transport
        return not transport.is_closing() and has_left(transport.get_extra_info("socket"))

    def stop(self) -> None:
        self.is_stopping = True

    def end_streams(self) -> None:
        if any(call.is_streaming for call in self._calls):
            self._socket_transport.abort()

    @property
    def taking_s(self) -> float:
        return self._connections.taking_s

    def close(self) -> None:
        self._socket_transport.close()

    def abort(self) -> None:
        self._socket_transport.abort()

    def give_up(self) -> None:
        """The caller does not take its answers."""
        self._connections.give_up(self)

    def sent(self, size_bytes: int) -> None:
        """Record ``size_bytes`` of an answer that are handed to hypercorn."""
        self._reader.counter.sent(size_bytes)

    def sweep(self) -> None:
        self._reader.counter.renew()
        for call in tuple(self._calls):
            call.sweep()
        if self._calls:
            self._seconds = 0
            if self._has_eof and self.has_left:
                self.abort()
            return
        limits = self._connections.limits
        if self._socket_transport.is_closing():  # its caller does not take the rest
            self._closing_s += 1
            if self._closing_s > min(limits.linger_s, self.taking_s):
                self.abort()
            return
        is_arriving = self._requests.is_arriving or not (self._requests.is_http_2 or self._requests.whole)
        if is_arriving is not self._was_arriving:
            self._was_arriving, self._seconds = is_arriving, 0
        self._seconds += 1
        limit = limits.header_timeout_s if is_arriving else limits.keepalive_timeout_s
        if 0 < limit < self._seconds or (is_arriving and self.is_stopping):
            self.close()


class _TimedCall:
    """One request: counts what arrives and what is taken, and gives up who is too slow."""

    def __init__(
        self, connection: HypercornConnection, stall_timer: StallTimer, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._connection, self._receive, self._send = connection, receive, send
        self._closes = False
        self.version = scope["http_version"]
        self._is_http_1 = self.version < "2"
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._stall_timer = stall_timer
        self._moved_bytes = 0
        self._is_socket = scope["type"] == "websocket"
        self._is_receiving = not self._is_socket
        #: Set if a message of a WebSocket is larger than its route allows. It was not read.
        self.too_large = asyncio.Event()
        self._is_sending = self.is_waiting = self._is_late = self._is_broken = self.has_begun = False
        self._sending_s = 0  # without a pause
        #: Whether it is answered while the answer is made, and whether in chunks of HTTP/1.1.
        self.is_streaming = self.is_chunked = False

    async def receive(self) -> Any:
        if self._is_socket:
            return await self._receive_message()
        try:
            event = await self._receive()
        except asyncio.CancelledError:
            if self._is_broken:
                raise _BrokenBody from None
            if self._is_late:
                raise _Late from None
            raise
        self._moved_bytes += len(event.get("body", b""))
        self._is_receiving = event.get("more_body", False)
        return event

    async def _receive_message(self) -> Any:
        """Return the next event of a WebSocket, or that a message is too large."""
        receiving, too_large = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self.too_large.wait())
        try:
            await asyncio.wait((receiving, too_large), return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else {"type": "headrace.message_too_large"}
        finally:
            receiving.cancel()
            too_large.cancel()

    async def send(self, message: Any) -> None:
        if self._is_socket:
            self.has_begun = True
            self.is_streaming |= message["type"] == "websocket.accept"
            await self._pass_on(message)
            return
        if message["type"] == "http.response.start":
            self.has_begun = True
            has_length = any(name == b"content-length" for name, _ in message["headers"])
            self.is_streaming = not has_length
            self.is_chunked = self.version == "1.1" and not has_length
            if self._is_http_1 and (self._closes or self._connection.is_stopping):
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        body = message.get("body", b"")
        if len(body) <= _PIECE_BYTES:
            await self._pass_on(message)
            return
        for begin in range(0, len(body), _PIECE_BYTES):
            more = message.get("more_body", False) or begin + _PIECE_BYTES < len(body)
            await self._pass_on({**message, "body": body[begin : begin + _PIECE_BYTES], "more_body": more})

    def break_off(self) -> None:
        """End the request, whose body breaks the rules, while it is received."""
        if self._is_receiving and not self._is_broken:
            self._is_broken = True
            self._task.cancel()

    async def refuse(self, reply: HttpReply) -> None:
        """Answer ``reply`` to what is no request, or not a whole one, and end the connection with it."""
        self._is_receiving = False
        size = sum(len(part) for part in reply.parts)
        headers = [(name.lower(), value) for name, value in reply.headers]
        self._closes = True
        start = {"type": "http.response.start", "status": reply.status}
        await self.send({**start, "headers": [*headers, (b"content-length", b"%d" % size)]})
        await self.send({"type": "http.response.body", "body": b"".join(reply.parts)})

    def sweep(self) -> None:
        if self._is_sending:
            self._sending_s += 1
            if not self.is_waiting and not self._connection.unsent_bytes:
                self._is_sending = False  # it has all that there is for it
            elif self._is_too_slow_to_take():
                self._connection.give_up()
        elif self._is_receiving and not self._is_late:
            too_slow = self._stall_timer.is_too_slow(self._moved_bytes)
            if too_slow or self._connection.is_stopping:
                self._is_late = True
                self._task.cancel()

    def _is_too_slow_to_take(self) -> bool:
        is_slow = self._stall_timer.is_too_slow(self._moved_bytes - self._connection.unsent_bytes)
        if self.is_streaming and self._stall_timer.moved_bytes:
            self._sending_s = 0  # the answer is still being made, and its caller reads
        return is_slow or self._sending_s > self._connection.taking_s

    async def _pass_on(self, message: Any) -> None:
        if not self._is_sending:
            self._sending_s = 0
            self._stall_timer.begin(self._moved_bytes - self._connection.unsent_bytes)
        self._is_sending, self._is_receiving, self.is_waiting = True, False, True
        try:
            await self._send(message)
        finally:
            self.is_waiting = False
        size = len(message.get("body") or message.get("bytes") or message.get("text") or b"")
        self._moved_bytes += size
        self._connection.sent(size)


class _Writer(asyncio.StreamWriter):
    """Omits the bytes of the next answer that `begin` has already written.

    If the client has disconnected, the kernel answers these bytes with a reset.
    """

    _begun_bytes = 0

    def begin(self) -> None:
        """Write what every answer begins with, once."""
        if not self._begun_bytes:
            super().write(_BEGINNING)
            self._begun_bytes = len(_BEGINNING)

    def write(self, data: Any) -> None:
        begun, self._begun_bytes = self._begun_bytes, 0
        super().write(data[begun:])
