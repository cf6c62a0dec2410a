"""The host ``hypercorn``, as the server sees it. It imports hypercorn when it starts, and not before."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from headrace import HttpHost, OptionGroup, TlsFiles

if TYPE_CHECKING:
    from headrace_hypercorn.hypercorn_server import HypercornServer


@dataclass(frozen=True)
class HypercornOptions(OptionGroup):
    """TLS of the host hypercorn."""

    name: ClassVar[str] = "hypercorn"
    certificate: str = field(
        default="", metadata={"help": "PEM file of the server's certificate and of those between it and its authority."}
    )
    key: str = field(default="", metadata={"help": "PEM file of the server's key, which needs no password."})
    client_ca: str = field(
        default="",
        metadata={"help": "PEM file of the authorities that sign the clients' certificates; each client needs one."},
    )

    @property
    def tls(self) -> TlsFiles | None:
        """The files; None without TLS."""
        if not (self.certificate or self.key or self.client_ca):
            return None
        return TlsFiles(
            service="HTTP",
            certificate=("--hypercorn-certificate", self.certificate),
            key=("--hypercorn-key", self.key),
            authorities=("--hypercorn-client-ca", self.client_ca),
            mutual=bool(self.client_ca),
        )


class HypercornFrontend(HttpHost):
    """KServe v2 over HTTP/1.1 and HTTP/2, with TLS if the options name its files."""

    name: ClassVar[str] = "hypercorn"
    _server_class: type[HypercornServer]
    _server: HypercornServer
    _tls: ssl.SSLContext | None

    def prepare(self) -> None:
        from headrace_hypercorn.hypercorn_server import HypercornServer

        files = self.engine.options.group(HypercornOptions).tls
        self._tls = None if files is None else files.context(["h2", "http/1.1"])
        self._server_class = HypercornServer

    async def serve(self, listener: socket.socket) -> None:
        self._server = self._server_class(self)
        await self._server.start(listener, self._tls)

    async def stop(self) -> None:
        await self._server.stop()
