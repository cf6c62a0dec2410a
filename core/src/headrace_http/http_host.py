"""What every host of HTTP has in common: its port, its limits, its start."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from headrace.frontends.base import Frontend
from headrace.frontends.listening import BACKLOG, announce, listen_http
from headrace_http.caller_limits import HttpLimits, flagged

if TYPE_CHECKING:
    from headrace.engine import Engine

log = logging.getLogger(__name__)


class HttpHost(Frontend):
    """KServe v2 over HTTP. A subclass accepts connections, and answers their requests by `create_app`.

    ``--http-server`` names the host that a server runs. ``port`` is the one that is listened on, once started.
    """

    protocol: ClassVar[str] = "http"
    #: As many connections may wait to be accepted.
    backlog: ClassVar[int] = BACKLOG
    port: int = 0

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        options = engine.options
        self.limits = HttpLimits(input_bytes=options.http_max_input_size, **flagged(options))

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_http

    @property
    def shares_port(self) -> bool:
        return self.engine.options.reuse_http_port

    async def start(self) -> None:
        options = self.engine.options
        await asyncio.to_thread(self.prepare)
        address, port = options.http_address, options.http_port
        listener = await asyncio.to_thread(listen_http, address, port, options.reuse_http_port)
        self.port = listener.getsockname()[1]
        try:
            await self.serve(listener)
        except BaseException:
            listener.close()
            raise
        announce(self.engine, log, "HTTPService", f"{options.http_address}:{self.port}")

    def prepare(self) -> None:
        """Read files and import what takes long, before the port is taken. On a thread. May raise `ConfigError`."""

    @abstractmethod
    async def serve(self, listener: socket.socket) -> None:
        """Accept connections of ``listener`` in the background until `stop`, which closes it."""
