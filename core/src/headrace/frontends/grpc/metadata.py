"""What the server and its models are, and what they have done (docs/spec/behaviours.md sections 1.6 and 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc.context import Context

if TYPE_CHECKING:
    from headrace.engine import Engine


async def server_metadata(
    engine: Engine, request: pb.ServerMetadataRequest, context: Context
) -> pb.ServerMetadataResponse:
    metadata = engine.metadata()
    return pb.ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)


async def model_metadata(
    engine: Engine, request: pb.ModelMetadataRequest, context: Context
) -> pb.ModelMetadataResponse:
    """All ready versions of the model, or the one asked for."""
    return pb.ModelMetadataResponse(**engine.model_metadata(request.name, request.version))


async def model_config(engine: Engine, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
    return pb.ModelConfigResponse(config=engine.resolve(request.name, request.version).config)


async def model_statistics(
    engine: Engine, request: pb.ModelStatisticsRequest, context: Context
) -> pb.ModelStatisticsResponse:
    """One entry per version asked for; an empty name asks for everything that is ready."""
    documents = engine.statistics(request.name, request.version)
    return pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(**document) for document in documents])
