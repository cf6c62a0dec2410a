"""The interface of an HTTP host, and the native host, which is the fast one."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from headrace.frontends.listening import BACKLOG
from headrace_http.caller_limits import HttpLimits, flagged
from headrace_http.open_connections import NativeConnections
from headrace_http.protocol import HttpProtocol
from headrace_http.routes import Routes

if TYPE_CHECKING:
    from headrace.engine import Engine


class HttpHost(ABC):
    """Serves ``listener`` until it is stopped. Owns it once started."""

    def __init__(self, engine: Engine, listener: socket.socket) -> None:
        self.engine, self.listener, self.routes = engine, listener, Routes(engine)

    @abstractmethod
    async def start(self) -> None:
        """Accept connections."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop accepting, answer the requests in flight, and close. If cancelled, drop the rest."""


class NativeHttpHost(HttpHost):
    """One `HttpProtocol` per connection, on the server's own event loop."""

    async def start(self) -> None:
        limits = HttpLimits(input_bytes=self.engine.options.http_max_input_size, **flagged(self.engine.options))
        self._connections = connections = NativeConnections(self.routes.dispatch, limits, self.engine.off_loop_work)
        self._acceptor = await asyncio.get_running_loop().create_server(
            lambda: HttpProtocol(connections), sock=self.listener, backlog=BACKLOG
        )
        connections.watch()

    async def stop(self) -> None:
        self._acceptor.close()
        await self._connections.drain(self.engine.options.exit_timeout_secs, serves_on=True)
