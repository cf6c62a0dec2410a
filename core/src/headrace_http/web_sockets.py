"""WebSocket routes of extensions (RFC 6455). ASGI hosts serve them; the native host can not.

::

    class Echo(WebSocketRoute):
        name = "GET /echo"

        async def converse(self, call, socket):
            await socket.accept()
            async for message in socket:
                await socket.send(message)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import orjson

from headrace.errors import Cancelled, Code, InternalError, Unavailable, Unsupported
from headrace.frontends.extension import require_async
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_http.message import ErrorReply, HttpReply, HttpRequest, Reply, error_reply, text_error
from headrace_http.plugin_routes import HttpCall, HttpRoute, RouteHandler

if TYPE_CHECKING:
    from headrace_http.message import Cancel
    from headrace_http.route_handlers import Handler, RouteHandlers
    from headrace_http.url_paths import PathTarget

log = rate_limited_logger(__name__)

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Status codes of a close (RFC 6455, 7.4.1).
NORMAL, GOING_AWAY, REFUSED, TOO_LARGE, FAILED = 1000, 1001, 1008, 1009, 1011
#: The longest reason of a close, in bytes.
_REASON_BYTES = 123
#: The event of a host that has dropped a message because it is larger than the route allows.
MESSAGE_TOO_LARGE = "headrace.message_too_large"


class WebSocketRoute(HttpRoute):
    """Answers one path by a WebSocket. ``name`` is ``"GET /path"``; everything else is as for any `HttpRoute`.

    A request to the path without a WebSocket handshake is answered with 426. A host that has no WebSockets answers 501.
    """

    kind: ClassVar[str] = "route"
    #: A message with more bytes closes the socket, with code 1009.
    max_message_bytes: ClassVar[int] = 1 << 20
    #: While the route waits for a message, the socket is closed after so many seconds without one. 0: never.
    idle_timeout_s: ClassVar[float] = 60

    async def converse(self, call: HttpCall, socket: WebSocket) -> None:
        """Accept and serve ``socket``. Its end closes the socket with code 1000.

        A `HeadraceError` before `WebSocket.accept` is answered with its HTTP status, a later one closes with 1008 and
        its text. Any other exception is a fault of the extension: status 500, or code 1011. Cancelled when the client
        disconnects, sends too much or nothing, or when the server stops.
        """
        raise NotImplementedError

    def handler(self, handlers: RouteHandlers) -> Handler:
        """Return a handler that runs `converse` in a task per socket, or refuses it if the host has no sockets."""
        if handlers.has_sockets:
            return SocketHandler(self, handlers)
        refusal = (
            f"'{self.name}' is a WebSocket, which this server's HTTP host can not serve: start it with "
            "--http-server=hypercorn"
        )
        log.warning("route %s", refusal)

        def refuse(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            reply(error_reply(Unsupported(refusal)))

        return refuse

    @classmethod
    def check(cls) -> None:
        super().check()
        if not cls.name.startswith("GET "):
            raise TypeError(f"route '{cls.name}' is a WebSocket, whose method is GET")
        if cls.converse is WebSocketRoute.converse:
            raise TypeError(f"route '{cls.name}' has no method 'converse'")
        require_async(cls, "converse")


class WebSocket:
    """One socket of a `WebSocketRoute`. At most one received message waits for the route: then the client must wait."""

    def __init__(self, receive: Receive, send: Send, scope: Mapping[str, Any]) -> None:
        """``receive`` and ``send`` are those of an ASGI server, as is ``scope``."""
        self._receive, self._send = receive, send
        #: The subprotocols that the client offers.
        self.subprotocols: Sequence[str] = scope.get("subprotocols") or ()
        self._has_denials = "websocket.http.response" in (scope.get("extensions") or {})
        self._is_accepted = self._is_closed = False
        self._max_bytes, self._idle_s = 0, 0.0
        self._waiting: asyncio.Queue[str | bytes] = asyncio.Queue(1)
        #: The code and the reason with which the server ends the socket.
        self.ending: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ the route calls

    async def accept(self, subprotocol: str = "", headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Accept the socket, once. ``subprotocol`` is one of `subprotocols`."""
        self._is_accepted = True
        given = [(name.lower(), value) for name, value in headers]
        await self._send({"type": "websocket.accept", "subprotocol": subprotocol or None, "headers": given})

    async def receive(self) -> str | bytes:
        """Return the next message: text, or bytes."""
        if not self._waiting.empty():
            return self._waiting.get_nowait()
        self._watch_idleness()
        try:
            return await self._waiting.get()
        finally:
            self._forget_idleness()

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        while True:
            yield await self.receive()

    async def send(self, message: str | bytes) -> None:
        """Send a message. Return when more may be sent. Raises `Cancelled` if the socket is closed."""
        if self._is_closed:
            raise Cancelled("the socket is closed")
        key = "text" if isinstance(message, str) else "bytes"
        await self._send({"type": "websocket.send", key: message})
        await asyncio.sleep(0)  # a server may return at once if the client reads everything
        if self._timer is not None:
            self._watch_idleness()

    async def close(self, code: int = NORMAL, reason: str = "") -> None:
        """Close the socket. ``reason`` is cut after 123 bytes."""
        if not self._is_closed:
            self._is_closed = True
            cut = reason.encode()[:_REASON_BYTES].decode(errors="ignore")
            await self._send({"type": "websocket.close", "code": code, "reason": cut})

    # ------------------------------------------------------------------ the host calls

    @property
    def is_accepted(self) -> bool:
        return self._is_accepted

    def begin(self, max_message_bytes: int, idle_timeout_s: float) -> None:
        """Set the limits of the route."""
        self._max_bytes, self._idle_s = max_message_bytes, idle_timeout_s

    def end(self, code: int, reason: str) -> None:
        """Let the server close the socket and cancel the route."""
        if not self.ending.done():
            self.ending.set_result((code, reason))

    def end_by_stop(self, error: Unavailable) -> None:
        """`end`, because the server stops."""
        self.end(GOING_AWAY, "the server is stopping")

    async def read(self) -> None:
        """Take messages from the host. Return when no more can come."""
        while True:
            event = await self._receive()
            if event["type"] == "websocket.disconnect":
                self._is_closed = True
                return
            if event["type"] == "websocket.receive":
                message = event.get("bytes")
                message = event["text"] if message is None else message
                if _size(message, self._max_bytes) <= self._max_bytes:
                    await self._waiting.put(message)
                    continue
            if event["type"] in ("websocket.receive", MESSAGE_TOO_LARGE):
                self.end(TOO_LARGE, f"a message may have at most {self._max_bytes} bytes")
                return

    async def finish(self, reply: HttpReply) -> None:
        """Close the socket after the route has ended with ``reply``; if it was not accepted, answer with ``reply``."""
        if self._is_accepted:
            if not isinstance(reply, ErrorReply):
                await self.close()
                return
            is_ours = reply.failure.code in (Code.INTERNAL, Code.UNKNOWN)
            await self.close(FAILED if is_ours else REFUSED, orjson.loads(b"".join(reply.parts))["error"])
        elif self._has_denials:
            body = b"".join(reply.parts)
            headers = [(name.lower(), value) for name, value in reply.headers]
            headers.append((b"content-length", b"%d" % len(body)))
            await self._send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
            await self._send({"type": "websocket.http.response.body", "body": body})
        else:
            await self.close()  # the server answers 403

    def _watch_idleness(self) -> None:
        self._forget_idleness()
        if self._idle_s:
            reason = f"no message in {self._idle_s:g} s"
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self.end, REFUSED, reason)

    def _forget_idleness(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _size(message: str | bytes, enough: int) -> int:
    """Return the bytes of ``message``, or any number above ``enough`` if it has more."""
    if isinstance(message, bytes) or len(message) > enough or message.isascii():
        return len(message)
    return len(message.encode(errors="replace"))


class SocketHandler(RouteHandler):
    """Runs ``route`` for each socket."""

    _route: WebSocketRoute

    @property
    def max_message_bytes(self) -> int:
        return self._route.max_message_bytes

    def __call__(self, request: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
        socket: WebSocket | None = getattr(reply, "socket", None)
        if socket is None:
            refused = text_error(
                426, f"'{self._route.name}' is a WebSocket: its request needs the handshake of RFC 6455"
            )
            reply(refused._replace(headers=(*refused.headers, (b"Upgrade", b"websocket"))))
            return None
        socket.begin(self._route.max_message_bytes, self._route.idle_timeout_s)
        return super().__call__(request, target, reply)

    async def _run(self, call: HttpCall, reply: Reply) -> None:
        socket: WebSocket = reply.socket  # type: ignore[attr-defined]  # it has one
        await self._route.converse(call, socket)
        if not socket.is_accepted:
            raise InternalError(f"route '{self._route.name}' has neither accepted nor refused")
        reply(HttpReply(101))
