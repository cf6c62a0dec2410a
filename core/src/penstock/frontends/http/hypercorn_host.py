"""HTTP/1.1 and HTTP/2 in pure Python: hypercorn, in front of the ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import os

from hypercorn.asyncio import serve
from hypercorn.config import Config

from penstock.frontends.base import LAST_WORDS_S
from penstock.frontends.http.asgi import create_app
from penstock.frontends.http.hosts import Host
from penstock.frontends.listening import BACKLOG


class HypercornHost(Host):
    """Runs hypercorn as a task of the server's own event loop."""

    async def start(self) -> None:
        config = Config()
        # hypercorn takes sockets by descriptor, and closes those that it has taken.
        config.bind = [f"fd://{os.dup(self.listener.fileno())}"]
        self.listener.close()
        config.backlog = BACKLOG
        config.accesslog = config.errorlog = None
        config.include_date_header = config.include_server_header = False
        config.graceful_timeout = self.server.options.exit_timeout_secs + LAST_WORDS_S
        self._told_to_stop = asyncio.Event()
        app = create_app(self.server)
        self._serving = asyncio.ensure_future(
            serve(app, config, shutdown_trigger=self._told_to_stop.wait)  # type: ignore[arg-type]
        )

    async def stop(self) -> None:
        self._told_to_stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
