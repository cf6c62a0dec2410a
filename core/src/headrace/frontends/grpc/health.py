"""Live, ready: of the server, of a model, and in the words of ``grpc.health.v1``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import Unavailable
from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc.context import Context
from headrace.frontends.grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse

if TYPE_CHECKING:
    from headrace.server import Server


async def server_live(server: Server, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
    _refuse_exiting(server)
    return pb.ServerLiveResponse(live=server.live)


async def server_ready(server: Server, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
    _refuse_exiting(server)
    return pb.ServerReadyResponse(ready=await server.check_ready())


async def model_ready(server: Server, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
    """False, and no error, for a model that is not there: that is what Triton's own clients are tested for."""
    return pb.ModelReadyResponse(ready=await server.is_model_ready(request.name, request.version))


async def check(server: Server, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
    """The server's readiness; ``request.service`` is ignored, as Triton does."""
    _refuse_exiting(server)
    status = HealthCheckResponse.SERVING if await server.check_ready() else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=status)


def _refuse_exiting(server: Server) -> None:
    if server.exiting:
        raise Unavailable("Server exiting")
