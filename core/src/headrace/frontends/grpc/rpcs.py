"""Every RPC that Headrace answers: one table, which any transport can serve.

Source: docs/spec/behaviours.md section 2.1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.message import Message

from headrace.errors import CallerError, Code
from headrace.frontends.access import Restrictions
from headrace.frontends.failures import is_verbose
from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc import health, long_messages, memory, metadata, repository, settings
from headrace.frontends.grpc.context import Cancel, Context, Metadata, Reply, Send, first, texts
from headrace.frontends.grpc.health_pb2 import HealthCheckRequest
from headrace.frontends.grpc.infer import Inference, model_infer
from headrace.frontends.grpc.reflection import SERVICES, Reflection
from headrace.frontends.grpc.reflection_pb2 import ServerReflectionRequest
from headrace.frontends.grpc.stream import model_stream_infer
from headrace.frontends.grpc.watching import watched
from headrace.frontends.grpc.wire import Buffer
from headrace.frontends.request_parameters import HeaderForwarding
from headrace.large import LARGE_BYTES, Large

if TYPE_CHECKING:
    from headrace.engine import Engine

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"

#: What handlers answer: a message, or one that is serialized already.
Answer: TypeAlias = "Message | bytes"
Unary: TypeAlias = Callable[[Any, Context], Awaitable[Answer]]
Stream: TypeAlias = Callable[[AsyncIterator[Any], Send, Context], Awaitable[None]]
Direct: TypeAlias = Callable[[Any, Context, Reply], "Cancel | None"]


@dataclass(frozen=True, slots=True)
class Rpc:
    """One RPC. ``parse`` makes the handler's request of what was received.

    Exactly one of three is set: ``unary`` and ``stream`` run in a task of their own. ``direct``
    answers by callback, now or later; it raises `HeadraceError` if it refuses now, and returns what
    cancels it.
    """

    service: str
    name: str
    category: str
    #: Of bytes or a memoryview. Raises `Large` for what is to be read by ``parse_large``, on a thread.
    parse: Callable[[Any], Any]
    unary: Unary | None = None
    stream: Stream | None = None
    direct: Direct | None = None
    parse_large: Callable[[Any], Any] | None = None


def serialize(answer: Answer) -> bytes:
    """What goes on the wire for a handler's ``answer``."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def rpcs(engine: Engine) -> list[Rpc]:
    """The RPCs of ``engine``, guarded by its ``--grpc-restricted-protocol``."""
    guard = _Guard(Restrictions(engine.options.grpc_restricted_protocol, "protocol"))
    forwarding = HeaderForwarding(engine.options.grpc_header_forward_pattern)
    inference = Inference(engine, partial(_forward, forwarding) if forwarding else None)
    table = [
        _rpc(SERVICE, name, category, request, unary=guard.unary(category, partial(handler, engine)))
        for name, category, request, handler in _HANDLERS
    ]
    check = guard.unary("health", partial(health.check, engine))
    infer = guard.direct("inference", partial(model_infer, inference))
    stream = guard.stream("inference", partial(model_stream_infer, inference))
    unpack = inference.layouts.unpack
    described = Reflection((SERVICE, HEALTH_SERVICE, *SERVICES)).serve
    offered = [
        *table,
        _rpc(HEALTH_SERVICE, "Check", "health", HealthCheckRequest, unary=check),
        Rpc(SERVICE, "ModelInfer", "inference", unpack, direct=infer, parse_large=long_messages.unpack),
        Rpc(SERVICE, "ModelStreamInfer", "inference", unpack, stream=stream, parse_large=long_messages.unpack),
        *(_rpc(name, "ServerReflectionInfo", "", ServerReflectionRequest, stream=described) for name in SERVICES),
    ]
    return [watched(rpc) for rpc in offered] if is_verbose() else offered


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

    return Rpc(service, name, category, parse, unary, stream, parse_large=long_messages.parser(request))


#: Those that need nothing but the server: name, category of restriction, request, handler.
_HANDLERS: tuple[tuple[str, str, type[Message], Callable[..., Awaitable[Answer]]], ...] = (
    ("ServerLive", "health", pb.ServerLiveRequest, health.server_live),
    ("ServerReady", "health", pb.ServerReadyRequest, health.server_ready),
    ("ModelReady", "health", pb.ModelReadyRequest, health.model_ready),
    ("ServerMetadata", "metadata", pb.ServerMetadataRequest, metadata.server_metadata),
    ("ModelMetadata", "metadata", pb.ModelMetadataRequest, metadata.model_metadata),
    ("ModelConfig", "model-config", pb.ModelConfigRequest, metadata.model_config),
    ("ModelStatistics", "statistics", pb.ModelStatisticsRequest, metadata.model_statistics),
    ("RepositoryIndex", "model-repository", pb.RepositoryIndexRequest, repository.index),
    ("RepositoryModelLoad", "model-repository", pb.RepositoryModelLoadRequest, repository.load),
    ("RepositoryModelUnload", "model-repository", pb.RepositoryModelUnloadRequest, repository.unload),
    ("SystemSharedMemoryStatus", "shared-memory", pb.SystemSharedMemoryStatusRequest, memory.system_status),
    ("SystemSharedMemoryRegister", "shared-memory", pb.SystemSharedMemoryRegisterRequest, memory.register),
    ("SystemSharedMemoryUnregister", "shared-memory", pb.SystemSharedMemoryUnregisterRequest, memory.unregister),
    ("CudaSharedMemoryStatus", "shared-memory", pb.CudaSharedMemoryStatusRequest, memory.cuda_status),
    ("CudaSharedMemoryRegister", "shared-memory", pb.CudaSharedMemoryRegisterRequest, memory.register),
    ("CudaSharedMemoryUnregister", "shared-memory", pb.CudaSharedMemoryUnregisterRequest, memory.unregister),
    ("TraceSetting", "trace", pb.TraceSettingRequest, settings.trace),
    ("LogSettings", "logging", pb.LogSettingsRequest, settings.log),
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
