"""HTTP/1.1 and HTTP/2 by hypercorn, on the connections that the host accepts."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import TYPE_CHECKING, cast

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from headrace import OpenConnections, create_app
from headrace_hypercorn.http2_frames import FrameTurns
from headrace_hypercorn.hypercorn_connection import HypercornConnection, Receive, Scope, Send

if TYPE_CHECKING:
    from headrace import HttpHost

log = logging.getLogger(__name__)

#: The time in which hypercorn ends what serves a lost connection by itself, and between two attempts to end it.
_AGAIN_S = 0.1


class HypercornServer:
    """Serves what ``host`` listens on, on the server's own event loop. hypercorn speaks on each connection."""

    def __init__(self, host: HttpHost) -> None:
        self._host = host
        self._connections = OpenConnections(host.limits, host.engine.off_loop_work)
        self._config = config = Config()
        config.accesslog = config.errorlog = None
        config.include_date_header = config.include_server_header = False
        config.h11_max_incomplete_size = 2 * host.limits.head_bytes  # ours is the bound
        config.keep_alive_max_requests = sys.maxsize
        config.keep_alive_timeout = None  # type: ignore[assignment]  # ours is the clock
        self._app = create_app(host.engine, host.served)
        config.websocket_max_message_size = sys.maxsize  # ours is the bound, by route
        self._wrapped = ASGIWrapper(self._answer)  # type: ignore[arg-type]
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Accept connections of ``listener``, over TLS if the host has it."""
        turns = FrameTurns()
        self._acceptor = await self._host.accept(
            listener, lambda: HypercornConnection(self._connections, self._app.socket_limit, turns, self._serve)
        )
        self._connections.watch()

    async def stop(self) -> None:
        self._acceptor.close()
        await self._connections.drain(
            self._host.engine.options.exit_timeout_secs, serves_on=self._host.served.serves_on
        )
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
        if not serving.cancelled() and (error := serving.exception()) is not None:
            if not connection.is_http_2:
                raise error
            log.debug("a connection of HTTP/2 ends: %r", error)  # its peer breaks a limit of h2 or priority

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            connection: HypercornConnection = scope["state"]["connection"]
            task = cast("asyncio.Task[None]", asyncio.current_task())
            connection.tasks.add(task)
            task.add_done_callback(connection.tasks.discard)
            await connection.answer(self._app, scope, receive, send)


async def _end(connection: HypercornConnection, context: WorkerContext, serving: asyncio.Task[None]) -> None:
    """Tell hypercorn that no further request comes. When the connection is lost, cancel its tasks until they end.

    Without that, hypercorn waits for the next request of a client that disconnected. Some tasks need more than one
    cancellation: hypercorn takes it for that of another task, or then sends an error that no client reads.
    """
    await connection.ended.wait()
    await context.terminated.set()
    await connection.lost.wait()
    while True:
        await asyncio.sleep(_AGAIN_S)
        for task in (serving, *connection.tasks):
            task.cancel()
