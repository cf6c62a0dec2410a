"""HTTP/1.1 and HTTP/2 in pure Python: hypercorn, in front of the ASGI application."""

from __future__ import annotations

import asyncio
import sys
from typing import cast

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from headrace.frontends.listening import BACKLOG
from headrace_http.asgi import Receive, Scope, Send, create_app
from headrace_http.caller_limits import HttpLimits, flagged
from headrace_http.http_host import HttpHost
from headrace_http.hypercorn_connection import HypercornConnection
from headrace_http.open_connections import OpenConnections

#: Between two attempts to end what serves a connection that is gone.
_AGAIN_S = 0.1


class HypercornHost(HttpHost):
    """Accepts connections on the server's own event loop; hypercorn speaks on each."""

    async def start(self) -> None:
        self._limits = limits = HttpLimits(**flagged(self.engine.options))
        self._connections = connections = OpenConnections(limits, self.engine.off_loop_work)
        self._config = config = Config()
        config.accesslog = config.errorlog = None
        config.include_date_header = config.include_server_header = False
        config.h11_max_incomplete_size = 2 * limits.head_bytes  # ours is the bound
        config.keep_alive_max_requests = sys.maxsize
        config.keep_alive_timeout = None  # type: ignore[assignment]  # ours is the clock
        self._app = create_app(self.engine, self.routes)
        self._wrapped = ASGIWrapper(self._answer)  # type: ignore[arg-type]
        self._serving: set[asyncio.Task[None]] = set()
        self._acceptor = await asyncio.get_running_loop().create_server(
            lambda: HypercornConnection(connections, self._serve), sock=self.listener, backlog=BACKLOG
        )
        connections.watch()

    async def stop(self) -> None:
        self._acceptor.close()
        await self._connections.drain(self.engine.options.exit_timeout_secs, serves_on=True)
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(
        self, connection: HypercornConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        loop, state, context = asyncio.get_running_loop(), {"connection": connection}, WorkerContext(None)
        server = TCPServer(self._wrapped, loop, self._config, context, state, reader, writer)
        owner = cast("asyncio.Task[None]", asyncio.current_task())
        self._serving.add(owner)
        owner.add_done_callback(self._serving.discard)
        serving = loop.create_task(server.run())
        ending = loop.create_task(_end(connection, context, serving))
        try:
            await asyncio.wait((serving,))
        finally:
            ending.cancel()
            await asyncio.wait((ending,))
        if not serving.cancelled():
            serving.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            connection: HypercornConnection = scope["state"]["connection"]
            await connection.answer(self._app, scope, receive, send)


async def _end(connection: HypercornConnection, context: WorkerContext, serving: asyncio.Task[None]) -> None:
    """hypercorn waits for the next request of a caller who has gone, unless it is told that all is over.

    Behind a pipelined request that cannot be answered any more it does so for ever, and sometimes takes its
    cancellation for that of a task of its own.
    """
    await connection.ended.wait()
    await context.terminated.set()
    await connection.lost.wait()
    while True:
        serving.cancel()
        await asyncio.sleep(_AGAIN_S)
