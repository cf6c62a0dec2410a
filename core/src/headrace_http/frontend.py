"""The HTTP frontend: start, stop, and the choice of its host."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, ClassVar

from headrace.distributions import need
from headrace.frontends.base import Frontend
from headrace.frontends.listening import announce, listen_http

if TYPE_CHECKING:
    from headrace_http.http_host import HttpHost

log = logging.getLogger(__name__)


class HttpFrontend(Frontend):
    """KServe v2 over HTTP. ``port`` is the port in use, once started."""

    name: ClassVar[str] = "http"
    port: int = 0
    _host: HttpHost | None = None

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_http

    @property
    def shares_port(self) -> bool:
        return self.engine.options.reuse_http_port

    async def start(self) -> None:
        options = self.engine.options
        host = await asyncio.to_thread(choose_host, options.http_server)
        address, port = options.http_address, options.http_port
        listener = await asyncio.to_thread(listen_http, address, port, options.reuse_http_port)
        self.port = listener.getsockname()[1]
        try:
            self._host = host(self.engine, listener)
            await self._host.start()
        except BaseException:
            listener.close()
            raise
        announce(self.engine, log, "HTTPService", f"{options.http_address}:{self.port}")

    async def stop(self) -> None:
        if self._host is not None:
            await self._host.stop()
            self._host = None


def choose_host(wanted: str) -> type[HttpHost]:
    """Return the host for ``--http-server``; ``auto`` means the native one.

    Imports the host's modules, so call it on a thread. Raises `ConfigError` if they are not installed.
    """
    if wanted == "hypercorn":
        need("hypercorn", "--http-server=hypercorn")
        from headrace_http.hypercorn_host import HypercornHost

        return HypercornHost
    from headrace_http.http_host import NativeHttpHost

    return NativeHttpHost
