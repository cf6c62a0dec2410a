"""Every RPC that Headrace answers: one table, which any transport can serve.

Source: docs/spec/behaviours.md section 2.1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from headrace.engine import Operation
from headrace.errors import HeadraceError
from headrace.frontends.failures import Failure, is_verbose, log, tell
from headrace.large import LARGE_BYTES, Large
from headrace_grpc import control_plane as control
from headrace_grpc import grpc_service_pb2 as pb
from headrace_grpc.admitted_calls import admitted
from headrace_grpc.health_pb2 import HealthCheckRequest
from headrace_grpc.infer import Inference, model_infer
from headrace_grpc.large_requests import bounded_parser, unpack_large
from headrace_grpc.reflection import SERVICES, Reflection
from headrace_grpc.reflection_pb2 import ServerReflectionRequest
from headrace_grpc.rpc import (
    Answer,
    Cancel,
    Context,
    Direct,
    Reply,
    Rpc,
    Send,
    Stream,
    Unary,
)
from headrace_grpc.stream_infer import model_stream_infer
from headrace_grpc.usual_messages import unpack
from headrace_grpc.wire import Buffer

if TYPE_CHECKING:
    from headrace.engine import Engine

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"


def rpcs(engine: Engine) -> list[Rpc]:
    """Return the RPCs of ``engine``. With interceptors, each call passes them first."""
    inference = Inference(engine)
    table = [
        _rpc(SERVICE, name, operation, request, unary=partial(handler, engine))
        for name, operation, request, handler in _HANDLERS
    ]
    check = partial(control.check_health, engine)
    infer, stream = partial(model_infer, inference), partial(model_stream_infer, inference)
    described = Reflection((SERVICE, HEALTH_SERVICE, *SERVICES)).serve
    offered = [
        *table,
        _rpc(HEALTH_SERVICE, "Check", Operation.READY, HealthCheckRequest, unary=check),
        Rpc(
            SERVICE,
            "ModelInfer",
            Operation.INFER,
            unpack,
            direct=infer,
            parse_large=unpack_large,
            model_field=_model_field(Operation.INFER, pb.ModelInferRequest),
        ),
        Rpc(SERVICE, "ModelStreamInfer", Operation.OPEN_STREAM, unpack, stream=stream, parse_large=unpack_large),
        *(
            _rpc(name, "ServerReflectionInfo", Operation.REFLECTION, ServerReflectionRequest, stream=described)
            for name in SERVICES
        ),
    ]
    watched = [_watched(rpc) for rpc in offered] if is_verbose() else offered
    admission = engine.admission
    return watched if admission is None else [admitted(rpc, admission, engine.large_work) for rpc in watched]


def _rpc(
    service: str,
    name: str,
    operation: Operation,
    request: type[Message],
    unary: Unary | None = None,
    stream: Stream | None = None,
) -> Rpc:
    """An RPC whose request is parsed as it is, and looked through before if it is large."""

    def parse(body: Buffer) -> Message:
        if len(body) > LARGE_BYTES:
            raise Large
        return request.FromString(body)  # type: ignore[arg-type]  # a memoryview is taken, too

    return Rpc(
        service,
        name,
        operation,
        parse,
        unary,
        stream,
        parse_large=bounded_parser(request),
        model_field=_model_field(operation, request),
    )


def _model_field(operation: Operation, request: type[Message]) -> tuple[int, str] | None:
    """Return which field of ``request`` names a model; None if no field does."""
    fields = request.DESCRIPTOR.fields_by_name
    field = fields.get("model_name") or (fields.get("name") if operation in _ASKED_BY_NAME else None)
    return None if field is None else (field.number, field.name)


#: The operations whose messages call the model ``name``.
_ASKED_BY_NAME = (Operation.MODEL_READY, Operation.MODEL_METADATA, Operation.MODEL_CONFIG, Operation.STATISTICS)
#: Those that need nothing but the engine: name, operation, request, handler.
_HANDLERS: tuple[tuple[str, Operation, type[Message], Callable[..., Awaitable[Answer]]], ...] = (
    ("ServerLive", Operation.LIVE, pb.ServerLiveRequest, control.server_live),
    ("ServerReady", Operation.READY, pb.ServerReadyRequest, control.server_ready),
    ("ModelReady", Operation.MODEL_READY, pb.ModelReadyRequest, control.model_ready),
    ("ServerMetadata", Operation.SERVER_METADATA, pb.ServerMetadataRequest, control.server_metadata),
    ("ModelMetadata", Operation.MODEL_METADATA, pb.ModelMetadataRequest, control.model_metadata),
    ("ModelConfig", Operation.MODEL_CONFIG, pb.ModelConfigRequest, control.model_config),
    ("ModelStatistics", Operation.STATISTICS, pb.ModelStatisticsRequest, control.model_statistics),
    ("RepositoryIndex", Operation.INDEX, pb.RepositoryIndexRequest, control.repository_index),
    ("RepositoryModelLoad", Operation.LOAD, pb.RepositoryModelLoadRequest, control.load_model),
    ("RepositoryModelUnload", Operation.UNLOAD, pb.RepositoryModelUnloadRequest, control.unload_model),
    (
        "SystemSharedMemoryStatus",
        Operation.SHARED_MEMORY_STATUS,
        pb.SystemSharedMemoryStatusRequest,
        control.system_memory_status,
    ),
    (
        "SystemSharedMemoryRegister",
        Operation.SHARED_MEMORY_REGISTER,
        pb.SystemSharedMemoryRegisterRequest,
        control.register_memory,
    ),
    (
        "SystemSharedMemoryUnregister",
        Operation.SHARED_MEMORY_UNREGISTER,
        pb.SystemSharedMemoryUnregisterRequest,
        control.unregister_memory,
    ),
    (
        "CudaSharedMemoryStatus",
        Operation.SHARED_MEMORY_STATUS,
        pb.CudaSharedMemoryStatusRequest,
        control.cuda_memory_status,
    ),
    (
        "CudaSharedMemoryRegister",
        Operation.SHARED_MEMORY_REGISTER,
        pb.CudaSharedMemoryRegisterRequest,
        control.register_memory,
    ),
    (
        "CudaSharedMemoryUnregister",
        Operation.SHARED_MEMORY_UNREGISTER,
        pb.CudaSharedMemoryUnregisterRequest,
        control.unregister_memory,
    ),
    ("TraceSetting", Operation.TRACE_SETTINGS, pb.TraceSettingRequest, control.trace_settings),
    ("LogSettings", Operation.LOG_SETTINGS, pb.LogSettingsRequest, control.log_settings),
)


# ---------------------------------------------------------------------- what a verbose log says, in Triton's words

_Step = Callable[[int, str], None]


def _watched(rpc: Rpc) -> Rpc:
    """``rpc``, with the log told of every call. Errors on a stream are told where they are answered."""
    log.debug("Ready for RPC '%s', 0", rpc.name)
    if rpc.unary is not None:
        return replace(rpc, unary=_watch_unary(rpc.name, rpc.unary))
    if rpc.direct is not None:
        return replace(rpc, direct=_watch_direct(f"{rpc.name}Handler", rpc.direct))
    assert rpc.stream is not None
    return replace(rpc, stream=_watch_stream(f"{rpc.name}Handler", rpc.stream))


def _steps(name: str) -> _Step:
    def step(number: int, what: str) -> None:
        log.debug("Process for %s, rpc_ok=1, %d step %s", name, number, what)

    return step


def _watch_unary(name: str, handler: Unary) -> Unary:
    numbers, step = count(), _steps(name)

    async def watch(request: Any, context: Context) -> Answer:
        number = next(numbers)
        step(number, "START")
        try:
            return await handler(request, context)
        except HeadraceError as error:
            model = getattr(request, "model_name", "") or getattr(request, "name", "")
            tell(Failure.of(error), name, model, getattr(request, "version", ""))
            raise
        finally:
            step(number, "COMPLETE")
            log.debug("Done for %s, %d", name, number)

    return watch


def _watch_direct(name: str, handler: Direct) -> Direct:
    numbers, step = count(), _steps(name)

    def watch(request: Any, context: Context, reply: Reply) -> Cancel | None:
        number, message = next(numbers), request.message
        log.debug("New request handler for %s, %d", name, number)
        step(number, "START")

        def told(answer: bytes | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                tell(Failure.of(answer), "Infer", message.model_name, message.model_version, message.id)
            step(number, "COMPLETE")
            reply(answer)
            step(number, "FINISH")
            log.debug("Done for %s, %d", name, number)

        try:
            return handler(request, context, told)
        except HeadraceError as error:
            told(error)
            return None

    return watch


def _watch_stream(name: str, handler: Stream) -> Stream:
    numbers, step = count(), _steps(name)

    async def watch(requests: AsyncIterator[Any], send: Send, context: Context) -> None:
        number = next(numbers)
        log.debug("New request handler for %s, %d", name, number)
        step(number, "START")

        async def read() -> AsyncIterator[Any]:
            async for request in requests:
                step(number, "READ")
                yield request

        async def write(body: bytes) -> None:
            await send(body)
            step(number, "WRITTEN")

        try:
            await handler(read(), write, context)
        finally:
            step(number, "COMPLETE")
            log.debug("Done for %s, %d", name, number)

    return watch
