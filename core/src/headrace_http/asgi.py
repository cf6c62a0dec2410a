"""The HTTP frontend as an ASGI application, for the hosts of plugins and for any other ASGI server.

It has the routes of the native host, and costs a future and two tasks per request. The ASGI server parses heads, so its
own limits on heads apply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.errors import HeadraceError, InvalidArgument, OutOfMemory, Unavailable, Unsupported
from headrace.frontends.access import host_of
from headrace_hosts.held_memory import budget_of
from headrace_http.asgi_memory import RequestMemory
from headrace_http.caller_limits import HttpLimits, larger_than_memory, too_many_chunks
from headrace_http.http_host import FirstPort, HttpPort
from headrace_http.message import HEADER_LENGTH, Buffer, HttpReply, HttpRequest, error_reply
from headrace_http.request_body import aligned
from headrace_http.request_head import Malformed, Refused, malformed, path_of
from headrace_http.routes import Routes
from headrace_http.web_sockets import WebSocket

if TYPE_CHECKING:
    from headrace.engine import Engine

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


_AMBIGUOUS = error_reply(InvalidArgument("the request states the length of its body twice"))._replace(
    headers=((b"Content-Type", b"application/json"), (b"Connection", b"close"))
)


#: At most this much is copied, or passed to the server, in one turn of the loop.
_TURN_BYTES = 1 << 20


class _Disconnected(Exception):
    pass


class _Broken(Exception):
    """An answer has begun and will not be complete: the ASGI server ends the connection, or the stream."""


class _Reply:
    """Takes the first reply to a request from the address ``peer``, which is empty if unknown."""

    __slots__ = ("_answered", "_send", "certificate", "peer", "socket")

    def __init__(
        self,
        answered: asyncio.Future[HttpReply | None],
        scope: Scope,
        send: Send,
        socket: WebSocket | None = None,
    ) -> None:
        #: The WebSocket that the request opens.
        self.socket = socket
        self._answered, self._send = answered, send
        self.peer = host_of(scope.get("client"))
        extensions = scope.get("extensions") or {}
        self.certificate: Mapping[str, Any] | None = extensions.get("headrace", {}).get("certificate")

    def __call__(self, reply: HttpReply) -> None:
        if not self._answered.done():
            self._answered.set_result(reply)

    def stream(self, head: HttpReply) -> _Streamed:
        return _Streamed(self._answered, self._send, head)


class _Streamed:
    """A streamed answer. The ASGI server waits for the caller, and chooses the framing."""

    def __init__(self, answered: asyncio.Future[HttpReply | None], send: Send, head: HttpReply) -> None:
        self._answered, self._send = answered, send
        self._head: HttpReply | None = head

    async def send(self, chunk: Buffer) -> None:
        await self._begin()
        for at in range(0, len(chunk), _TURN_BYTES):
            body = bytes(chunk[at : at + _TURN_BYTES])
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(0)  # a server may return at once if the client reads everything

    async def end(self) -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": b""})
        if not self._answered.done():
            self._answered.set_result(None)

    def break_off(self) -> None:
        if not self._answered.done():
            self._answered.set_exception(_Broken("the answer was broken off"))

    async def _begin(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            headers = [(name.lower(), value) for name, value in head.headers]
            await self._send({"type": "http.response.start", "status": head.status, "headers": headers})


class AsgiApp:
    """An ASGI application. `create_app` makes one."""

    def __init__(self, engine: Engine, served: HttpPort) -> None:
        self._engine = engine
        self._routes = served.answering(has_sockets=True)
        self._budget = budget_of(engine)
        #: Returns how many bytes a message to the WebSocket of a path may have; 0 if the path has none.
        self.socket_limit = self._routes.socket_limit

    def refusal(self, error: HeadraceError, status: int, scope: Scope) -> HttpReply:
        """Return the answer to the request of ``scope``, which the ASGI server refuses by ``error``, with ``status``;
        0: that of its code."""
        return self._routes.refusal(Refused(error, status), _without_body(scope))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            memory = RequestMemory(self._budget)
            try:
                await _serve(self._routes, memory, scope, receive, send)
            finally:
                memory.end()
        elif scope["type"] == "websocket":
            await _serve_socket(self._engine, self._routes, scope, receive, send)


def create_app(engine: Engine, served: HttpPort | None = None) -> AsgiApp:
    """Return an ASGI application for ``engine``, whose server was started on the same loop.

    It answers what ``served`` answers: by default KServe v2 and the routes of all extensions.

    An ASGI server that ends TLS may put the certificate of the client, as ``ssl.SSLSocket.getpeercert`` returns it,
    into ``scope["extensions"]["headrace"]["certificate"]``. Interceptors see it.
    """
    return AsgiApp(engine, FirstPort(engine) if served is None else served)


async def _live(receive: Receive, send: Send) -> None:
    """Confirm the lifespan events. Nothing starts or stops here: the server has its own lifecycle."""
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return


async def _serve(routes: Routes, memory: RequestMemory, scope: Scope, receive: Receive, send: Send) -> None:
    raw, headers = _headers(scope)
    if _is_ambiguous(headers):
        await _send(send, _AMBIGUOUS, scope["method"])
        return
    try:
        path = path_of(scope.get("raw_path", scope["path"].encode()))
        body = await _receive_body(receive, routes.limits, memory, path, headers)
    except _Disconnected:
        return
    except Malformed as error:
        await _send(send, malformed(error).reply, scope["method"])
        return
    except (InvalidArgument, OutOfMemory) as error:
        await _send(send, routes.refusal(Refused(error), _without_body(scope)), scope["method"])
        return
    request = HttpRequest(scope["method"], path, headers, body, raw, scope.get("query_string", b"").decode("latin-1"))
    reply = await _answer(routes, request, scope, receive, send)
    del body, request
    if reply is not None:
        memory.responds(sum(len(part) for part in reply.parts))
        await _send(send, reply, scope["method"])


async def _serve_socket(engine: Engine, routes: Routes, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one WebSocket until its route ends, its client disconnects, or the server ends it."""
    raw, headers = _headers(scope)
    socket = WebSocket(receive, send, scope)
    if scope.get("http_version", "1.1") >= "2":
        await socket.finish(error_reply(Unsupported("a WebSocket over HTTP/2 is not supported: connect by HTTP/1.1")))
        return
    await receive()  # websocket.connect
    try:
        path = path_of(scope.get("raw_path", scope["path"].encode()))
    except Malformed as error:
        await socket.finish(malformed(error).reply)
        return
    query = scope.get("query_string", b"").decode("latin-1")
    answered: asyncio.Future[HttpReply | None] = asyncio.get_running_loop().create_future()
    engine.streams.add(socket.end_by_stop)
    cancel = routes.dispatch(
        HttpRequest("GET", path, headers, memoryview(b""), raw, query), _Reply(answered, scope, send, socket)
    )
    reading = asyncio.ensure_future(socket.read())
    try:
        await asyncio.wait((answered, reading, socket.ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        engine.streams.discard(socket.end_by_stop)
        reading.cancel()
        if not answered.done():
            answered.cancel()
            if cancel is not None:
                cancel()
        await asyncio.gather(reading, return_exceptions=True)
    if not answered.cancelled() and (reply := answered.result()) is not None:
        await socket.finish(reply)
    elif socket.ending.done():
        code, reason = socket.ending.result()
        await (socket.close(code, reason) if socket.is_accepted else socket.finish(error_reply(Unavailable(reason))))


def _without_body(scope: Scope) -> HttpRequest:
    """Return the request of ``scope``, whose body was not received. Its path is valid."""
    raw, headers = _headers(scope)
    path = path_of(scope.get("raw_path", scope["path"].encode()))
    return HttpRequest(scope.get("method", "GET"), path, headers, memoryview(b""), raw)


def _headers(scope: Scope) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
    """Return the headers as received, and by name."""
    raw = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    headers: dict[bytes, bytes] = {}
    for name, value in raw:
        headers[name] = headers[name] + b", " + value if name in headers else value
    return raw, headers


def _is_ambiguous(headers: dict[bytes, bytes]) -> bool:
    """True if two headers say where the body ends: a proxy in front may have used the other one."""
    length = headers.get(b"content-length")
    return length is not None and (b"," in length or b"transfer-encoding" in headers)


async def _receive_body(
    receive: Receive, limits: HttpLimits, memory: RequestMemory, path: str, headers: dict[bytes, bytes]
) -> memoryview:
    """Return the whole body. If it came in several pieces, its tensors start at an aligned address."""
    limit = limits.body_limit(path, headers)
    announced = headers.get(b"content-length", b"0")
    length = int(announced[:20]) if announced.isdigit() else 0
    if length > limit:
        raise limits.body_refusal(length, path, headers)
    if length > memory.most_bytes:
        raise larger_than_memory(length, memory.most_bytes)
    pieces, size, more = [], 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise _Disconnected
        more = event.get("more_body", False)
        if piece := event.get("body", b""):
            pieces.append(piece)
            size += len(piece)
        if size > limit:
            raise limits.body_refusal(size, path, headers)
        if size > memory.most_bytes:
            raise larger_than_memory(size, memory.most_bytes)
        await memory.arrived(size, 0 if not more else length - size if length else None)
        if len(pieces) > limits.chunks:
            raise too_many_chunks(limits.chunks)
    return memoryview(pieces[0] if pieces else b"") if len(pieces) < 2 else await _join(pieces, size, headers)


async def _join(pieces: list[bytes], size: int, headers: dict[bytes, bytes]) -> memoryview:
    """Return ``pieces`` in one buffer. Copies every byte once, `_TURN_BYTES` per turn of the loop."""
    length = headers.get(HEADER_LENGTH, b"0")
    memory, position = aligned(size, int(length) if length.isdigit() and len(length) < 12 else 0), 0
    for piece in pieces:
        memory[position : position + len(piece)] = piece
        if (position + len(piece)) // _TURN_BYTES > position // _TURN_BYTES:
            await asyncio.sleep(0)
        position += len(piece)
    return memory


async def _answer(routes: Routes, request: HttpRequest, scope: Scope, receive: Receive, send: Send) -> HttpReply | None:
    """Return the reply, or None if it was sent already, or if the caller disconnected, which cancels the request."""
    answered: asyncio.Future[HttpReply | None] = asyncio.get_running_loop().create_future()
    cancel = routes.dispatch(request, _Reply(answered, scope, send))
    if answered.done():
        return answered.result()
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((answered, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not answered.done():
            answered.cancel()
            if cancel is not None:
                cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    return None if answered.cancelled() else answered.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, reply: HttpReply, method: str) -> None:
    size = sum(len(part) for part in reply.parts)
    headers = [(name.lower(), value) for name, value in reply.headers]
    headers.append((b"content-length", b"%d" % size))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    parts = reply.parts if method != "HEAD" else ()
    # Servers frame each piece, so a small reply is one piece, and one write.
    if size <= _TURN_BYTES:
        await send({"type": "http.response.body", "body": b"".join(parts)})
        return
    for part in parts:
        for at in range(0, len(part), _TURN_BYTES):
            await send({"type": "http.response.body", "body": bytes(part[at : at + _TURN_BYTES]), "more_body": True})
            await asyncio.sleep(0)  # a server may return at once if the client reads everything
    await send({"type": "http.response.body", "body": b""})
