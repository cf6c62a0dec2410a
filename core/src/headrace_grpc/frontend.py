"""The gRPC frontend: start, stop, and the choice of its host."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from headrace.config.options import GrpcServer
from headrace.distributions import need
from headrace.frontends.base import Frontend
from headrace.frontends.failures import is_verbose
from headrace.frontends.listening import announce
from headrace_grpc.hosts import Host
from headrace_grpc.rpc_table import rpcs

log = logging.getLogger(__name__)

_VERBOSITY = "GRPC_VERBOSITY"


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
        """Listen. Raises `Unavailable` with a busy address, and `ConfigError` for the TLS files."""
        options = self.engine.options
        make_host = await asyncio.to_thread(choose_host, options.grpc_server)
        host = make_host(rpcs(self.engine), options, self.engine.off_loop_work)
        self.port = await host.start()
        self._host = host
        announce(self.engine, log, "GRPCInferenceService", f"{options.grpc_address}:{self.port}")

    async def stop(self) -> None:
        if self._host is not None:
            await self._host.stop()
            self._host = None


def choose_host(wanted: GrpcServer) -> type[Host]:
    """Return the host for ``--grpc-server``; ``auto`` means the native one.

    Imports the host's modules, so call it on a thread. Raises `ConfigError` if they are not installed.
    """
    if wanted == "grpcio":
        need("grpc", "--grpc-server=grpcio")
        with _quiet_core():
            from headrace_grpc.grpcio_host import GrpcioHost

        return GrpcioHost
    from headrace_grpc.native_host import NativeHost

    return NativeHost


@contextmanager
def _quiet_core() -> Iterator[None]:
    """Import grpc so that its core logs nothing: it would write outside our log, also on behalf of peers.

    ``GRPC_VERBOSITY`` is read only at the import. If it is set, or if the log is verbose, it is not changed.
    """
    if _VERBOSITY in os.environ or is_verbose():
        yield
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        yield
    finally:
        del os.environ[_VERBOSITY]
