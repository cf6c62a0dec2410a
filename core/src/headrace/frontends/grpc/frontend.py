"""The gRPC frontend as the server sees it: start and stop."""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

from headrace.frontends.base import Frontend
from headrace.frontends.grpc.hosts import Host, choose_host
from headrace.frontends.grpc.rpcs import rpcs
from headrace.frontends.listening import announce

log = logging.getLogger(__name__)


class GrpcFrontend(Frontend):
    """``inference.GRPCInferenceService``, health and reflection. ``port`` is set by `start`."""

    name: ClassVar[str] = "grpc"
    port: int = 0
    _host: Host | None = None

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_grpc

    @property
    def shares_port(self) -> bool:
        return self.engine.options.reuse_grpc_port

    async def start(self) -> None:
        """Listen. Raises `Unavailable` naming a busy address and `ConfigError` for the TLS files."""
        options = self.engine.options
        make_host = await asyncio.to_thread(choose_host, options.grpc_server)
        host = make_host(rpcs(self.engine), options, self.engine.large_work)
        self.port = await host.start()
        self._host = host
        announce(self.engine, log, "GRPCInferenceService", f"{options.grpc_address}:{self.port}")

    async def stop(self) -> None:
        if self._host is not None:
            await self._host.stop()
            self._host = None
