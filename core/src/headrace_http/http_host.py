"""Ports of HTTP, and the hosts that serve them: any number of ports run on the host that the server has."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace.errors import ConfigError, HeadraceError
from headrace.frontends.base import Frontend
from headrace_hosts.accepting import Acceptor, accept
from headrace_hosts.listening import BACKLOG, announce, listen_http
from headrace_hosts.tls_files import TlsFiles, http_tls
from headrace_http.caller_limits import HttpLimits, port_limits
from headrace_http.message import HttpReply, HttpRequest
from headrace_http.plugin_routes import HttpRoute, check_routes
from headrace_http.routes import Routes

if TYPE_CHECKING:
    from headrace.engine import Engine

log = logging.getLogger(__name__)

#: The answer to a client that does not speak TLS on a port with TLS.
_NO_TLS = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 50\r\nConnection: close\r\n\r\n"
    b'{"error":"this port speaks TLS: connect by https"}'
)


class HttpPort(Frontend):
    """A frontend with an HTTP port of its own, on the HTTP code of the server's host.

    ::

        class Scores(HttpPort):
            name = "scores"
            routes = (Ping, Score)

            enabled = True
            place = "127.0.0.1", 8080

    It has the limits, the admission, the shutdown and, if the host has it, the TLS of the first port.
    """

    #: The name of the port in log lines and errors; ``name`` if empty.
    service: ClassVar[str] = ""
    #: Its routes. `make_routes` makes one object of each class, with this frontend as its ``extension``.
    routes: ClassVar[Sequence[type[HttpRoute]]] = ()
    #: Answers every other path, by any method; the path in its name is not used. None: other paths are not found.
    otherwise: ClassVar[type[HttpRoute] | None] = None
    #: False: when the server stops, connections end as soon as they are idle. True: they are served for a short time.
    serves_on: ClassVar[bool] = True
    _host: HttpHost | None = None

    @property
    @abstractmethod
    def place(self) -> tuple[str, int]:
        """The address and the port to listen on; port 0 takes a free one."""

    @property
    def transport(self) -> str:
        """The `Caller.transport` of its callers. The flags for HTTP, such as restrictions, apply to ``"http"``."""
        return self.name

    @property
    def max_body_bytes(self) -> int | None:
        """The largest body. None: as on the first port, where binary tensors of ``.../infer`` may be larger."""
        return None

    @property
    def tls(self) -> TlsFiles | None:
        """The files of TLS: those of ``--http-use-ssl``, by default. None without TLS."""
        return http_tls(self.engine.options)

    @property
    def host(self) -> type[HttpHost]:
        """The host that serves the port: the one that ``--http-server`` names."""
        found: type[HttpHost] = self.engine.host("http")
        return found

    @property
    def port(self) -> int:
        """The port in use; 0 before the start."""
        return 0 if self._host is None else self._host.port

    async def start(self) -> None:
        host = self.host(self.engine, self)
        await host.start()
        self._host = host

    async def stop(self) -> None:
        if self._host is not None:
            await self._host.stop()

    def limits(self) -> HttpLimits:
        """Return the limits of its connections."""
        return port_limits(self.engine.options, self.max_body_bytes)

    def make_routes(self) -> Sequence[HttpRoute]:
        """Return its routes. A subclass may add routes to paths that depend on the options."""
        return [route(self) for route in self.routes]

    def refusal(self, error: HeadraceError, usual: HttpReply, request: HttpRequest) -> HttpReply:
        """Return the answer to ``request``, which is refused by ``error`` and is no route's: see `HttpRoute.refusal`.

        The path is empty if the head of the request is invalid.
        """
        return usual

    def answering(self, has_sockets: bool) -> Routes:
        """Return the handlers of its requests, for its host. Raises `ConfigError` for a route that is wrong.

        Without ``has_sockets``, WebSocket routes are refused.
        """
        routes = self.make_routes()
        try:
            check_routes([type(route) for route in routes])
        except TypeError as error:
            raise ConfigError(f"frontend '{self.name}': {error}") from error
        otherwise = None if self.otherwise is None else self.otherwise(self)
        return Routes(self.engine, routes, otherwise, self.transport, self.limits(), has_sockets, self.refusal)

    @classmethod
    def check(cls) -> None:
        """Raise TypeError with the rule that its routes break."""
        check_routes(cls.routes)
        if cls.otherwise is not None:
            cls.otherwise.check()


class FirstPort(HttpPort):
    """The port of KServe v2, with the routes of all extensions."""

    name: ClassVar[str] = "http"
    service: ClassVar[str] = "HTTPService"

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_http

    @property
    def shares_port(self) -> bool:
        return self.engine.options.reuse_http_port

    @property
    def place(self) -> tuple[str, int]:
        return self.engine.options.http_address, self.engine.options.http_port

    def answering(self, has_sockets: bool) -> Routes:
        return Routes(self.engine, has_sockets=has_sockets)


class HttpHost(Frontend):
    """Accepts the connections of one port, and answers their requests by `create_app`.

    ``--http-server`` names the host that a server runs. ``served`` is the port that it serves: by default that of
    KServe v2. ``port`` is the number that is listened on, once started.
    """

    protocol: ClassVar[str] = "http"
    #: As many connections may wait to be accepted.
    backlog: ClassVar[int] = BACKLOG
    #: The protocols that it offers over TLS, the best first (ALPN).
    alpn: ClassVar[Sequence[str]] = ("http/1.1",)
    port: int = 0

    def __init__(self, engine: Engine, served: HttpPort | None = None) -> None:
        super().__init__(engine)
        self.served: HttpPort = FirstPort(engine) if served is None else served
        self.limits = self.served.limits()

    @property
    def enabled(self) -> bool:
        return self.served.enabled

    @property
    def shares_port(self) -> bool:
        return self.served.shares_port

    @property
    def tls(self) -> TlsFiles | None:
        """The files of TLS of the port; None without."""
        return self.served.tls

    async def start(self) -> None:
        await asyncio.to_thread(self.prepare)
        address, port = self.served.place
        service = self.served.service or self.served.name
        listener = await asyncio.to_thread(listen_http, address, port, self.shares_port, service=service)
        self.port = listener.getsockname()[1]
        try:
            await self.serve(listener)
        except BaseException:
            listener.close()
            raise
        announce(self.engine, log, service, f"{address}:{self.port}")

    def prepare(self) -> None:
        """Read files and import what takes long, before the port is taken. On a thread. May raise `ConfigError`."""

    async def accept(self, listener: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]) -> Acceptor:
        """Accept the connections of ``listener`` until the result is closed. Each gets a protocol of its own.

        Over TLS, it gets it after the handshake. Handshakes are bounded in number and time.
        """
        handshake_s = self.limits.header_timeout_s
        return await accept(make_protocol, listener, self.tls, self.alpn, handshake_s=handshake_s, no_tls=_NO_TLS)

    @abstractmethod
    async def serve(self, listener: socket.socket) -> None:
        """Accept connections of ``listener`` in the background until `stop`, which closes it."""
