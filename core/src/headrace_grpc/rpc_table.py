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

from headrace.errors import CallerError, Code, HeadraceError
from headrace.frontends.access import Restrictions
from headrace.frontends.failures import Failure, is_verbose, log, tell
from headrace.frontends.request_parameters import HeaderForwarding
from headrace.large import LARGE_BYTES, Large
from headrace_grpc import control_plane as control
from headrace_grpc import grpc_service_pb2 as pb
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
    Metadata,
    Reply,
    Rpc,
    Send,
    Stream,
    Unary,
    first,
    texts,
)
from headrace_grpc.stream_infer import model_stream_infer
from headrace_grpc.usual_messages import unpack
from headrace_grpc.wire import Buffer

if TYPE_CHECKING:
    from headrace.engine import Engine

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"


def rpcs(engine: Engine) -> list[Rpc]:
    """The RPCs of ``engine``, guarded by its ``--grpc-restricted-protocol``."""
    guard = _Guard(Restrictions(engine.options.grpc_restricted_protocol, "protocol"))
    forwarding = HeaderForwarding(engine.options.grpc_header_forward_pattern)
    inference = Inference(engine, partial(_forward, forwarding) if forwarding else None)
    table = [
        _rpc(SERVICE, name, category, request, unary=guard.unary(category, partial(handler, engine)))
        for name, category, request, handler in _HANDLERS
    ]
    check = guard.unary("health", partial(control.check_health, engine))
    infer = guard.direct("inference", partial(model_infer, inference))
    stream = guard.stream("inference", partial(model_stream_infer, inference))
    described = Reflection((SERVICE, HEALTH_SERVICE, *SERVICES)).serve
    offered = [
        *table,
        _rpc(HEALTH_SERVICE, "Check", "health", HealthCheckRequest, unary=check),
        Rpc(SERVICE, "ModelInfer", "inference", unpack, direct=infer, parse_large=unpack_large),
        Rpc(SERVICE, "ModelStreamInfer", "inference", unpack, stream=stream, parse_large=unpack_large),
        *(_rpc(name, "ServerReflectionInfo", "", ServerReflectionRequest, stream=described) for name in SERVICES),
    ]
    return [_watched(rpc) for rpc in offered] if is_verbose() else offered


def _rpc(
    service: str,
    name: str,
    category: str,
    request: type[Message],
    unary: Unary | None = None,
    stream: Stream | None = None,
) -> Rpc:
    """An RPC whose request is parsed as it is, and looked through before if it is large."""

    def parse(body: Buffer) -> Message:
        if len(body) > LARGE_BYTES:
            raise Large
        return request.FromString(body)  # type: ignore[arg-type]  # a memoryview is taken, too

    return Rpc(service, name, category, parse, unary, stream, parse_large=bounded_parser(request))


#: Those that need nothing but the engine: name, category of restriction, request, handler.
_HANDLERS: tuple[tuple[str, str, type[Message], Callable[..., Awaitable[Answer]]], ...] = (
    ("ServerLive", "health", pb.ServerLiveRequest, control.server_live),
    ("ServerReady", "health", pb.ServerReadyRequest, control.server_ready),
    ("ModelReady", "health", pb.ModelReadyRequest, control.model_ready),
    ("ServerMetadata", "metadata", pb.ServerMetadataRequest, control.server_metadata),
    ("ModelMetadata", "metadata", pb.ModelMetadataRequest, control.model_metadata),
    ("ModelConfig", "model-config", pb.ModelConfigRequest, control.model_config),
    ("ModelStatistics", "statistics", pb.ModelStatisticsRequest, control.model_statistics),
    ("RepositoryIndex", "model-repository", pb.RepositoryIndexRequest, control.repository_index),
    ("RepositoryModelLoad", "model-repository", pb.RepositoryModelLoadRequest, control.load_model),
    ("RepositoryModelUnload", "model-repository", pb.RepositoryModelUnloadRequest, control.unload_model),
    ("SystemSharedMemoryStatus", "shared-memory", pb.SystemSharedMemoryStatusRequest, control.system_memory_status),
    ("SystemSharedMemoryRegister", "shared-memory", pb.SystemSharedMemoryRegisterRequest, control.register_memory),
    (
        "SystemSharedMemoryUnregister",
        "shared-memory",
        pb.SystemSharedMemoryUnregisterRequest,
        control.unregister_memory,
    ),
    ("CudaSharedMemoryStatus", "shared-memory", pb.CudaSharedMemoryStatusRequest, control.cuda_memory_status),
    ("CudaSharedMemoryRegister", "shared-memory", pb.CudaSharedMemoryRegisterRequest, control.register_memory),
    ("CudaSharedMemoryUnregister", "shared-memory", pb.CudaSharedMemoryUnregisterRequest, control.unregister_memory),
    ("TraceSetting", "trace", pb.TraceSettingRequest, control.trace_settings),
    ("LogSettings", "logging", pb.LogSettingsRequest, control.log_settings),
)


class _Guard:
    """Puts the check of a restricted category in front of a handler, where there is one."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    def unary(self, category: str, handler: Unary) -> Unary:
        async def guarded(request: Any, context: Context) -> Answer:
            self._check(category, context)
            return await handler(request, context)

        return guarded if self._restrictions.covers(category) else handler

    def stream(self, category: str, handler: Stream) -> Stream:
        async def guarded(requests: AsyncIterator[Any], send: Send, context: Context) -> None:
            self._check(category, context)
            await handler(requests, send, context)

        return guarded if self._restrictions.covers(category) else handler

    def direct(self, category: str, handler: Direct) -> Direct:
        def guarded(request: Any, context: Context, reply: Reply) -> Cancel | None:
            self._check(category, context)
            return handler(request, context, reply)

        return guarded if self._restrictions.covers(category) else handler

    def _check(self, category: str, context: Context) -> None:
        refusal = self._restrictions.refusal(category, partial(first, context.metadata))
        if refusal is not None:
            raise CallerError(refusal, Code.UNAVAILABLE)  # as Triton has it


def _forward(forwarding: HeaderForwarding, metadata: Metadata) -> dict[str, str]:
    return forwarding.parameters(texts(metadata))


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
