"""The methods of Triton's extensions that are not installed. They answer like a Triton that was built without them.

An installed extension with the same method replaces it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from headrace.engine import Operation
from headrace.errors import Unsupported
from headrace_grpc.grpc_service_pb2 import (
    CudaSharedMemoryRegisterRequest,
    CudaSharedMemoryStatusRequest,
    CudaSharedMemoryStatusResponse,
    CudaSharedMemoryUnregisterRequest,
    LogSettingsRequest,
    SystemSharedMemoryRegisterRequest,
    SystemSharedMemoryStatusRequest,
    SystemSharedMemoryStatusResponse,
    SystemSharedMemoryUnregisterRequest,
    TraceSettingRequest,
)
from headrace_grpc.own_methods import OwnMethod, message_method
from headrace_grpc.rpc import Answer, Context
from headrace_hosts.absent_extensions import note_absent, refuse_unknown_region, region_change_error

if TYPE_CHECKING:
    from headrace.engine import Engine


async def _trace_settings(engine: Engine, request: TraceSettingRequest, context: Context) -> Answer:
    if "trace_file" in request.settings:
        raise Unsupported("trace file location can not be updated through network protocol")
    raise Unsupported("this server has no trace settings")


async def _log_settings(engine: Engine, request: LogSettingsRequest, context: Context) -> Answer:
    if "log_file" in request.settings:
        raise Unsupported("log file location can not be updated through network protocol")
    raise Unsupported("log settings can not be read or changed while the server runs; set the --log-* flags at start")


async def _system_status(engine: Engine, request: SystemSharedMemoryStatusRequest, context: Context) -> Answer:
    refuse_unknown_region("system", request.name)
    return SystemSharedMemoryStatusResponse()


async def _cuda_status(engine: Engine, request: CudaSharedMemoryStatusRequest, context: Context) -> Answer:
    refuse_unknown_region("cuda", request.name)
    return CudaSharedMemoryStatusResponse()


async def _change_memory(engine: Engine, request: Any, context: Context) -> Answer:
    raise region_change_error()


def _noted(
    extension: str, handler: Callable[[Engine, Any, Context], Awaitable[Answer]]
) -> Callable[[Engine, Any, Context], Awaitable[Answer]]:
    async def handle(engine: Engine, request: Any, context: Context) -> Answer:
        note_absent(extension)
        return await handler(engine, request, context)

    return handle


_STATUS, _REGISTER, _UNREGISTER = (
    Operation.SHARED_MEMORY_STATUS,
    Operation.SHARED_MEMORY_REGISTER,
    Operation.SHARED_MEMORY_UNREGISTER,
)
_SYSTEM = _noted("system_shared_memory", _change_memory)
_CUDA = _noted("cuda_shared_memory", _change_memory)

ABSENT: tuple[type[OwnMethod], ...] = (
    message_method(
        "SystemSharedMemoryStatus",
        _STATUS,
        SystemSharedMemoryStatusRequest,
        _noted("system_shared_memory", _system_status),
    ),
    message_method("SystemSharedMemoryRegister", _REGISTER, SystemSharedMemoryRegisterRequest, _SYSTEM),
    message_method("SystemSharedMemoryUnregister", _UNREGISTER, SystemSharedMemoryUnregisterRequest, _SYSTEM),
    message_method(
        "CudaSharedMemoryStatus",
        _STATUS,
        CudaSharedMemoryStatusRequest,
        _noted("cuda_shared_memory", _cuda_status),
    ),
    message_method("CudaSharedMemoryRegister", _REGISTER, CudaSharedMemoryRegisterRequest, _CUDA),
    message_method("CudaSharedMemoryUnregister", _UNREGISTER, CudaSharedMemoryUnregisterRequest, _CUDA),
    message_method("TraceSetting", Operation.TRACE_SETTINGS, TraceSettingRequest, _noted("trace", _trace_settings)),
    message_method("LogSettings", Operation.LOG_SETTINGS, LogSettingsRequest, _noted("logging", _log_settings)),
)
