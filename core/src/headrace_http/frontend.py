"""Headrace's own HTTP host, the fast one."""

from __future__ import annotations

import socket
from typing import ClassVar

from headrace_hosts.held_memory import budget_of
from headrace_http.http_host import HttpHost
from headrace_http.open_connections import NativeConnections
from headrace_http.protocol import HttpProtocol


class HttpFrontend(HttpHost):
    """One `HttpProtocol` per connection, on the server's own event loop."""

    name: ClassVar[str] = "http"

    async def serve(self, listener: socket.socket) -> None:
        routes = self.served.answering(has_sockets=False)
        self._connections = connections = NativeConnections(
            routes.dispatch, routes.limits, self.engine.off_loop_work, budget_of(self.engine), routes.refusal
        )
        routes.on_dispatch.append(connections.use)
        self._acceptor = await self.accept(listener, lambda: HttpProtocol(connections))
        connections.watch()

    async def stop(self) -> None:
        self._acceptor.close()
        await self._connections.drain(self.engine.options.exit_timeout_secs, serves_on=self.served.serves_on)
