"""The host ``grpcio``, as the server sees it. It imports grpcio when it starts, and not before."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from headrace import GrpcHost

if TYPE_CHECKING:
    from headrace_grpcio.grpcio_server import GrpcioServer

_VERBOSITY = "GRPC_VERBOSITY"


class GrpcioFrontend(GrpcHost):
    """``inference.GRPCInferenceService``, health and reflection by grpcio's own server."""

    name: ClassVar[str] = "grpcio"

    async def serve(self) -> int:
        server = await asyncio.to_thread(_import_server)
        self._server = server(self)
        return await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()


def _import_server() -> type[GrpcioServer]:
    with _quiet_core():
        from headrace_grpcio.grpcio_server import GrpcioServer

        return GrpcioServer


@contextmanager
def _quiet_core() -> Iterator[None]:
    """Import grpc so that its core writes nothing: it would write past the log, and whatever peers make it write.

    ``GRPC_VERBOSITY`` is read at that moment only. If it is set, or if the log is verbose, the core writes.
    """
    if _VERBOSITY in os.environ or logging.getLogger("headrace").isEnabledFor(logging.DEBUG):
        yield
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        yield
    finally:
        del os.environ[_VERBOSITY]
