"""Headrace's own extensions over gRPC: every method that it answers (docs/spec/behaviours.md section 2.1)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from headrace.engine import Operation
from headrace.frontends.extension import Addition, Extension
from headrace_grpc.control_plane import (
    check_health,
    load_model,
    model_config,
    model_metadata,
    model_ready,
    model_statistics,
    repository_index,
    server_live,
    server_metadata,
    server_ready,
    unload_model,
)
from headrace_grpc.grpc_service_pb2 import (
    ModelConfigRequest,
    ModelInferRequest,
    ModelMetadataRequest,
    ModelReadyRequest,
    ModelStatisticsRequest,
    RepositoryIndexRequest,
    RepositoryModelLoadRequest,
    RepositoryModelUnloadRequest,
    ServerLiveRequest,
    ServerMetadataRequest,
    ServerReadyRequest,
)
from headrace_grpc.health_pb2 import HealthCheckRequest
from headrace_grpc.infer import model_infer, permitted_infer, recorded_infer
from headrace_grpc.large_requests import unpack_large
from headrace_grpc.own_methods import HEALTH_SERVICE, OwnMethod, message, message_method, model_field, own_method
from headrace_grpc.plugin_methods import MethodServices, read_name
from headrace_grpc.reflection import SERVICES, Reflection
from headrace_grpc.reflection_pb2 import ServerReflectionRequest
from headrace_grpc.rpc import Rpc
from headrace_grpc.stream_infer import model_stream_infer
from headrace_grpc.usual_messages import unpack


def _model_infer(method: OwnMethod, services: MethodServices) -> Rpc:
    plain = services.inference.without_admission()
    return Rpc(
        *read_name(type(method)),
        Operation.INFER,
        unpack,
        direct=partial(model_infer, services.inference),
        unadmitted=partial(model_infer, plain),
        recorded=partial(recorded_infer, plain),
        permitted=partial(permitted_infer, plain),
        parse_large=unpack_large,
        model_field=model_field(Operation.INFER, ModelInferRequest),
    )


def _model_stream_infer(method: OwnMethod, services: MethodServices) -> Rpc:
    stream = partial(model_stream_infer, services.inference)
    return Rpc(*read_name(type(method)), Operation.OPEN_STREAM, unpack, stream=stream, parse_large=unpack_large)


def _reflection(method: OwnMethod, services: MethodServices) -> Rpc:
    request = message(Operation.REFLECTION, ServerReflectionRequest)
    serve = Reflection(services.services).serve
    return Rpc(*read_name(type(method)), Operation.REFLECTION, stream=serve, **request)


class GrpcInference(Extension):
    """The protocol itself: inference, health and metadata."""

    name: ClassVar[str] = "grpc_inference"
    adds: ClassVar[tuple[type[Addition], ...]] = (
        message_method("ServerLive", Operation.LIVE, ServerLiveRequest, server_live),
        message_method("ServerReady", Operation.READY, ServerReadyRequest, server_ready),
        message_method("ModelReady", Operation.MODEL_READY, ModelReadyRequest, model_ready),
        message_method("ServerMetadata", Operation.SERVER_METADATA, ServerMetadataRequest, server_metadata),
        message_method("ModelMetadata", Operation.MODEL_METADATA, ModelMetadataRequest, model_metadata),
        message_method("Check", Operation.READY, HealthCheckRequest, check_health, HEALTH_SERVICE),
        own_method("ModelInfer", Operation.INFER, _model_infer),
        own_method("ModelStreamInfer", Operation.OPEN_STREAM, _model_stream_infer),
    )


class GrpcModelConfiguration(Extension):
    name: ClassVar[str] = "grpc_model_configuration"
    announces = ("model_configuration",)
    adds: ClassVar[tuple[type[Addition], ...]] = (
        message_method("ModelConfig", Operation.MODEL_CONFIG, ModelConfigRequest, model_config),
    )


class GrpcStatistics(Extension):
    name: ClassVar[str] = "grpc_statistics"
    announces = ("statistics",)
    adds: ClassVar[tuple[type[Addition], ...]] = (
        message_method("ModelStatistics", Operation.STATISTICS, ModelStatisticsRequest, model_statistics),
    )


class GrpcModelRepository(Extension):
    name: ClassVar[str] = "grpc_model_repository"
    announces = ("model_repository", "model_repository(unload_dependents)")
    adds: ClassVar[tuple[type[Addition], ...]] = (
        message_method("RepositoryIndex", Operation.INDEX, RepositoryIndexRequest, repository_index),
        message_method("RepositoryModelLoad", Operation.LOAD, RepositoryModelLoadRequest, load_model),
        message_method("RepositoryModelUnload", Operation.UNLOAD, RepositoryModelUnloadRequest, unload_model),
    )


class GrpcReflection(Extension):
    """The descriptions of the services, for tools such as grpcurl. Not in Triton."""

    name: ClassVar[str] = "grpc_reflection"
    adds: ClassVar[tuple[type[Addition], ...]] = tuple(
        own_method("ServerReflectionInfo", Operation.REFLECTION, _reflection, service) for service in SERVICES
    )


OWN: list[type[Extension]] = [
    GrpcInference,
    GrpcModelConfiguration,
    GrpcStatistics,
    GrpcModelRepository,
    GrpcReflection,
]
