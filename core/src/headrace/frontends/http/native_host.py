"""HTTP/1.1 of our own: the fast host, and the default."""

from __future__ import annotations

import asyncio

from headrace.frontends.http.connections import Connections
from headrace.frontends.http.hosts import Host
from headrace.frontends.http.limits import Limits, flagged
from headrace.frontends.http.protocol import HttpProtocol
from headrace.frontends.http.routes import Routes
from headrace.frontends.listening import BACKLOG


class NativeHost(Host):
    """One `HttpProtocol` per connection, on the server's own event loop."""

    async def start(self) -> None:
        limits = Limits(input_bytes=self.engine.options.http_max_input_size, **flagged(self.engine.options))
        self._connections = connections = Connections(Routes(self.engine).dispatch, limits)
        self._acceptor = await asyncio.get_running_loop().create_server(
            lambda: HttpProtocol(connections), sock=self.listener, backlog=BACKLOG
        )
        connections.watch()

    async def stop(self) -> None:
        self._acceptor.close()
        await self._connections.drain()
