"""Shared memory of clients: not served yet, so no region is ever registered.

Source of the texts: docs/spec/behaviours.md section 12.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config.support import NO_CLIENT_SHM
from headrace.errors import NotFound, Unsupported
from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc.context import Context

if TYPE_CHECKING:
    from headrace.server import Server


async def system_status(
    server: Server, request: pb.SystemSharedMemoryStatusRequest, context: Context
) -> pb.SystemSharedMemoryStatusResponse:
    if request.name:
        raise NotFound(f"Unable to find system shared memory region: '{request.name}'")
    return pb.SystemSharedMemoryStatusResponse()


async def cuda_status(
    server: Server, request: pb.CudaSharedMemoryStatusRequest, context: Context
) -> pb.CudaSharedMemoryStatusResponse:
    if request.name:
        raise NotFound(f"Unable to find cuda shared memory region: '{request.name}'")
    return pb.CudaSharedMemoryStatusResponse()


async def register(
    server: Server,
    request: pb.SystemSharedMemoryRegisterRequest | pb.CudaSharedMemoryRegisterRequest,
    context: Context,
) -> pb.SystemSharedMemoryRegisterResponse | pb.CudaSharedMemoryRegisterResponse:
    raise Unsupported(NO_CLIENT_SHM)


async def unregister(
    server: Server,
    request: pb.SystemSharedMemoryUnregisterRequest | pb.CudaSharedMemoryUnregisterRequest,
    context: Context,
) -> pb.SystemSharedMemoryUnregisterResponse | pb.CudaSharedMemoryUnregisterResponse:
    raise Unsupported(NO_CLIENT_SHM)
