"""Live, ready: of the server, of a model, and in the words of ``grpc.health.v1``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import Unavailable
from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc.context import Context
from headrace.frontends.grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse

if TYPE_CHECKING:
    from headrace.engine import Engine


async def server_live(engine: Engine, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
    _refuse_exiting(engine)
    return pb.ServerLiveResponse(live=engine.live)


async def server_ready(engine: Engine, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
    _refuse_exiting(engine)
    return pb.ServerReadyResponse(ready=await engine.check_ready())


async def model_ready(engine: Engine, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
    """False, and no error, for a model that is not there: that is what Triton's own clients are tested for."""
    return pb.ModelReadyResponse(ready=await engine.is_model_ready(request.name, request.version))


async def check(engine: Engine, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
    """The server's readiness; ``request.service`` is ignored, as Triton does."""
    _refuse_exiting(engine)
    status = HealthCheckResponse.SERVING if await engine.check_ready() else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=status)


def _refuse_exiting(engine: Engine) -> None:
    if engine.exiting:
        raise Unavailable("Server exiting")
