"""The RPCs except inference: functions of the engine, a parsed request and its `Context`.

Source: docs/spec/behaviours.md sections 1.6, 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidArgument, Unavailable, Unsupported
from headrace.frontends.access import ModelFilesRule
from headrace.frontends.failures import without_paths
from headrace_grpc.grpc_service_pb2 import (
    ModelConfigRequest,
    ModelConfigResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ModelRepositoryParameter,
    ModelStatistics,
    ModelStatisticsRequest,
    ModelStatisticsResponse,
    RepositoryIndexRequest,
    RepositoryIndexResponse,
    RepositoryModelLoadRequest,
    RepositoryModelLoadResponse,
    RepositoryModelUnloadRequest,
    RepositoryModelUnloadResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerMetadataRequest,
    ServerMetadataResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)
from headrace_grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse
from headrace_grpc.rpc import Context, first

if TYPE_CHECKING:
    from headrace.engine import Caller, Engine

_UNLOAD_DEPENDENTS = "unload_dependents"


# ---------------------------------------------------------------------- live and ready


async def server_live(engine: Engine, request: ServerLiveRequest, context: Context) -> ServerLiveResponse:
    _refuse_exiting(engine)
    return ServerLiveResponse(live=engine.live)


async def server_ready(engine: Engine, request: ServerReadyRequest, context: Context) -> ServerReadyResponse:
    _refuse_exiting(engine)
    return ServerReadyResponse(ready=await engine.check_ready())


async def model_ready(engine: Engine, request: ModelReadyRequest, context: Context) -> ModelReadyResponse:
    """Return False, not an error, for an unknown model: the tests of Triton's clients expect that."""
    return ModelReadyResponse(ready=await engine.is_model_ready(request.name, request.version))


async def check_health(engine: Engine, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
    """Return the server's readiness. As in Triton, ``request.service`` is ignored."""
    _refuse_exiting(engine)
    status = HealthCheckResponse.SERVING if await engine.check_ready() else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=status)


def _refuse_exiting(engine: Engine) -> None:
    if engine.exiting:
        raise Unavailable("Server exiting")


# ---------------------------------------------------------------------- metadata and statistics


async def server_metadata(engine: Engine, request: ServerMetadataRequest, context: Context) -> ServerMetadataResponse:
    metadata = engine.metadata()
    return ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)


async def model_metadata(engine: Engine, request: ModelMetadataRequest, context: Context) -> ModelMetadataResponse:
    """Return all ready versions of the model, or the requested one."""
    return ModelMetadataResponse(**engine.model_metadata(request.name, request.version))


async def model_config(engine: Engine, request: ModelConfigRequest, context: Context) -> ModelConfigResponse:
    return ModelConfigResponse(config=engine.resolve(request.name, request.version).config)


async def model_statistics(
    engine: Engine, request: ModelStatisticsRequest, context: Context
) -> ModelStatisticsResponse:
    """Return one entry per requested version; for an empty name, all that are ready."""
    documents = engine.statistics(request.name, request.version)
    return ModelStatisticsResponse(model_stats=[ModelStatistics(**document) for document in documents])


# ---------------------------------------------------------------------- the repository


async def repository_index(
    engine: Engine, request: RepositoryIndexRequest, context: Context
) -> RepositoryIndexResponse:
    _refuse_repository_name(request.repository_name)
    entries = await engine.list_repository(request.ready)
    return RepositoryIndexResponse(
        models=[
            RepositoryIndexResponse.ModelIndex(
                name=entry.name, version=entry.version, state=entry.state, reason=without_paths(entry.reason)
            )
            for entry in entries
        ]
    )


async def load_model(
    engine: Engine, request: RepositoryModelLoadRequest, context: Context
) -> RepositoryModelLoadResponse:
    _refuse_repository_name(request.repository_name)
    restricted = "model-repository" in engine.options.grpc_restricted_protocol
    model_files_rule = ModelFilesRule(engine.options.model_files_from, restricted, "--grpc-restricted-protocol")
    model_files_rule.check(request.parameters, context.peer, partial(first, context.metadata))
    overrides = _overrides(request.parameters)
    _note(context, sizes={name: len(value) for name, value in overrides.items()})
    await engine.load(request.model_name, overrides)
    return RepositoryModelLoadResponse()


async def unload_model(
    engine: Engine, request: RepositoryModelUnloadRequest, context: Context
) -> RepositoryModelUnloadResponse:
    _refuse_repository_name(request.repository_name)
    dependents = False
    if _UNLOAD_DEPENDENTS in request.parameters:
        value = request.parameters[_UNLOAD_DEPENDENTS]
        if value.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidArgument("invalid value type for 'unload_dependents' parameter, expected bool_param.")
        dependents = value.bool_param
    _note(context, unload_dependents=dependents)
    await engine.unload(request.model_name, dependents)
    return RepositoryModelUnloadResponse()


def _note(context: Context, **details: Any) -> None:
    """Note what the operation is asked to change. ``context`` has a caller if the server has interceptors."""
    caller: Caller | None = getattr(context, "caller", None)
    if caller is not None:
        caller.note(**details)


def _overrides(parameters: Mapping[str, ModelRepositoryParameter]) -> dict[str, str | bytes]:
    """Return ``config`` as JSON text, and ``file:<path>`` as the file's bytes."""
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


def _require(key: str, value: ModelRepositoryParameter, kind: str) -> None:
    if value.WhichOneof("parameter_choice") != kind:
        raise InvalidArgument(f"invalid value type for load parameter '{key}', expected {kind}.")


def _refuse_repository_name(name: str) -> None:
    if name:
        raise Unsupported("'repository_name' specification is not supported")
