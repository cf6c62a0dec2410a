"""What accepts connections and speaks HTTP: the native host and hypercorn, behind one interface."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from penstock.frontends.http.limits import Limits

if TYPE_CHECKING:
    from penstock.server import Server


class Host(ABC):
    """Serves ``listener`` until stopped."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        self.server = server
        self.listener = listener

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None:
        """Stop accepting, answer what is in flight, close. Cancelled, drop what is left."""


class NativeHost(Host):
    """HTTP/1.1 over llhttp: the fast one."""

    async def start(self) -> None:
        from penstock.frontends.http.connections import Connections
        from penstock.frontends.http.protocol import HttpProtocol
        from penstock.frontends.http.routes import Routes

        limits = Limits(input_bytes=self.server.options.http_max_input_size)
        self._connections = connections = Connections(Routes(self.server).dispatch, limits)
        loop = asyncio.get_running_loop()
        self._acceptor = await loop.create_server(lambda: HttpProtocol(connections), sock=self.listener)
        connections.watch()

    async def stop(self) -> None:
        self._acceptor.close()
        await self._connections.drain()


class HypercornHost(Host):
    """HTTP/1.1 and HTTP/2 in pure Python, through the ASGI application."""

    async def start(self) -> None:
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        from penstock.frontends.http.asgi import create_app

        config = Config()
        # hypercorn takes sockets by descriptor, and closes those that it has taken.
        config.bind = [f"fd://{os.dup(self.listener.fileno())}"]
        self.listener.close()
        config.accesslog = config.errorlog = None
        config.include_date_header = config.include_server_header = False
        config.graceful_timeout = max(1, self.server.options.exit_timeout_secs)
        self._told_to_stop = asyncio.Event()
        app = create_app(self.server)
        self._serving = asyncio.ensure_future(
            serve(app, config, shutdown_trigger=self._told_to_stop.wait)  # type: ignore[arg-type]
        )

    async def stop(self) -> None:
        self._told_to_stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving


def choose_host(wanted: str) -> type[Host]:
    """The host for ``--http-server``; ``auto`` takes the native one wherever it can run."""
    if wanted == "hypercorn":
        return HypercornHost
    can_run = sys.platform != "win32" and importlib.util.find_spec("httptools") is not None
    return NativeHost if can_run or wanted != "auto" else HypercornHost
