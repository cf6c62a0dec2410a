"""The repository's index, and loading and unloading (docs/spec/behaviours.md section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from headrace.errors import InvalidArgument, Unsupported
from headrace.frontends.access import Uploads
from headrace.frontends.failures import shown
from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc.context import Context, first

if TYPE_CHECKING:
    from headrace.engine import Engine

_UNLOAD_DEPENDENTS = "unload_dependents"


async def index(engine: Engine, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
    _refuse_repository_name(request.repository_name)
    entries = await engine.list_repository(request.ready)
    return pb.RepositoryIndexResponse(
        models=[
            pb.RepositoryIndexResponse.ModelIndex(
                name=entry.name, version=entry.version, state=entry.state, reason=shown(entry.reason)
            )
            for entry in entries
        ]
    )


async def load(
    engine: Engine, request: pb.RepositoryModelLoadRequest, context: Context
) -> pb.RepositoryModelLoadResponse:
    _refuse_repository_name(request.repository_name)
    restricted = "model-repository" in engine.options.grpc_restricted_protocol
    uploads = Uploads(engine.options.model_files_from, restricted, "--grpc-restricted-protocol")
    uploads.check(request.parameters, context.peer, partial(first, context.metadata))
    await engine.load(request.model_name, _overrides(request.parameters))
    return pb.RepositoryModelLoadResponse()


async def unload(
    engine: Engine, request: pb.RepositoryModelUnloadRequest, context: Context
) -> pb.RepositoryModelUnloadResponse:
    _refuse_repository_name(request.repository_name)
    dependents = False
    if _UNLOAD_DEPENDENTS in request.parameters:
        value = request.parameters[_UNLOAD_DEPENDENTS]
        if value.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidArgument("invalid value type for 'unload_dependents' parameter, expected bool_param.")
        dependents = value.bool_param
    await engine.unload(request.model_name, dependents)
    return pb.RepositoryModelUnloadResponse()


def _overrides(parameters: Mapping[str, pb.ModelRepositoryParameter]) -> dict[str, str | bytes]:
    """``config`` as JSON text, ``file:<path>`` as the file's bytes."""
    overrides: dict[str, str | bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            _require(key, value, "string_param")
            overrides[key] = value.string_param
        elif key.startswith("file:"):
            _require(key, value, "bytes_param")
            overrides[key] = value.bytes_param
        else:
            raise InvalidArgument(f"unrecognized load parameter '{key}'.")
    return overrides


def _require(key: str, value: pb.ModelRepositoryParameter, kind: str) -> None:
    if value.WhichOneof("parameter_choice") != kind:
        raise InvalidArgument(f"invalid value type for load parameter '{key}', expected {kind}.")


def _refuse_repository_name(name: str) -> None:
    if name:
        raise Unsupported("'repository_name' specification is not supported")
