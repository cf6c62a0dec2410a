"""The HTTP frontend as the server sees it: start and stop."""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

from headrace.frontends.base import Frontend
from headrace.frontends.http.hosts import Host, choose_host
from headrace.frontends.http.listening import listen
from headrace.frontends.listening import announce

log = logging.getLogger(__name__)


class HttpFrontend(Frontend):
    """KServe v2 over HTTP. ``port`` is the one that is listened on, once started."""

    name: ClassVar[str] = "http"
    port: int = 0
    _host: Host | None = None

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_http

    @property
    def shares_port(self) -> bool:
        return self.engine.options.reuse_http_port

    async def start(self) -> None:
        options = self.engine.options
        host = await asyncio.to_thread(choose_host, options.http_server)
        listener = await asyncio.to_thread(listen, options.http_address, options.http_port, options.reuse_http_port)
        self.port = listener.getsockname()[1]
        self._host = host(self.engine, listener)
        try:
            await self._host.start()
        except BaseException:
            listener.close()
            raise
        announce(self.engine, log, "HTTPService", f"{options.http_address}:{self.port}")

    async def stop(self) -> None:
        if self._host is not None:
            await self._host.stop()
            self._host = None
