"""Shared memory of clients, which is not served yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc.context import Context
from headrace.frontends.shared_memory import refuse_change, require_status

if TYPE_CHECKING:
    from headrace.engine import Engine


async def system_status(
    engine: Engine, request: pb.SystemSharedMemoryStatusRequest, context: Context
) -> pb.SystemSharedMemoryStatusResponse:
    require_status("system", request.name)
    return pb.SystemSharedMemoryStatusResponse()


async def cuda_status(
    engine: Engine, request: pb.CudaSharedMemoryStatusRequest, context: Context
) -> pb.CudaSharedMemoryStatusResponse:
    require_status("cuda", request.name)
    return pb.CudaSharedMemoryStatusResponse()


async def register(
    engine: Engine,
    request: pb.SystemSharedMemoryRegisterRequest | pb.CudaSharedMemoryRegisterRequest,
    context: Context,
) -> pb.SystemSharedMemoryRegisterResponse | pb.CudaSharedMemoryRegisterResponse:
    raise refuse_change()


async def unregister(
    engine: Engine,
    request: pb.SystemSharedMemoryUnregisterRequest | pb.CudaSharedMemoryUnregisterRequest,
    context: Context,
) -> pb.SystemSharedMemoryUnregisterResponse | pb.CudaSharedMemoryUnregisterResponse:
    raise refuse_change()
