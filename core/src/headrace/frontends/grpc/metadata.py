"""What the server and its models are (docs/spec/behaviours.md sections 1.6 and 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc.context import Context
from headrace.messages.spec import Spec
from headrace.models.served import ServedModel

if TYPE_CHECKING:
    from headrace.server import Server

_TensorMetadata = pb.ModelMetadataResponse.TensorMetadata


async def server_metadata(
    server: Server, request: pb.ServerMetadataRequest, context: Context
) -> pb.ServerMetadataResponse:
    metadata = server.metadata()
    return pb.ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)


async def model_metadata(
    server: Server, request: pb.ModelMetadataRequest, context: Context
) -> pb.ModelMetadataResponse:
    """All ready versions of the model, or the one asked for."""
    model = server.resolve(request.name, request.version)
    versions = [model.version] if request.version else server.ready_versions(request.name)
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[str(version) for version in versions],
        platform=model.platform,
        inputs=_tensors(model, model.inputs),
        outputs=_tensors(model, model.outputs),
    )


async def model_config(server: Server, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
    return pb.ModelConfigResponse(config=server.resolve(request.name, request.version).config)


def _tensors(model: ServedModel, specs: Mapping[str, Spec]) -> list[_TensorMetadata]:
    return [
        _TensorMetadata(name=spec.name, datatype=spec.datatype.name, shape=model.wire_shape(spec))
        for spec in specs.values()
    ]
