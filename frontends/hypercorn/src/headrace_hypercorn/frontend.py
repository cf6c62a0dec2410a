"""The host ``hypercorn``, as the server sees it. It imports hypercorn when it starts, and not before."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace import HttpHost

if TYPE_CHECKING:
    from headrace_hypercorn.hypercorn_server import HypercornServer


class HypercornFrontend(HttpHost):
    """KServe v2 over HTTP/1.1 and HTTP/2, with TLS if the options name its files."""

    name: ClassVar[str] = "hypercorn"
    alpn: ClassVar[Sequence[str]] = ("h2", "http/1.1")
    _server_class: type[HypercornServer]
    _server: HypercornServer

    def prepare(self) -> None:
        from headrace_hypercorn.hypercorn_server import HypercornServer

        self._server_class = HypercornServer

    async def serve(self, listener: socket.socket) -> None:
        self._server = self._server_class(self)
        await self._server.start(listener)

    async def stop(self) -> None:
        await self._server.stop()
