"""The methods of shared memory over gRPC."""

from __future__ import annotations

from typing import Any, ClassVar

from headrace import Caller, GrpcMethod, Operation
from headrace import grpc_service_pb2 as pb
from headrace_shm.regions import Kind
from headrace_shm.registration import RegionExtension

_SERVICE = "/inference.GRPCInferenceService"


class SystemStatusMethod(GrpcMethod):
    name = f"{_SERVICE}/SystemSharedMemoryStatus"
    operation = Operation.SHARED_MEMORY_STATUS
    extension: RegionExtension
    memory_kind: ClassVar[Kind] = "system"
    response: ClassVar[type[Any]] = pb.SystemSharedMemoryStatusResponse

    @staticmethod
    def parse(message: bytes) -> Any:
        return pb.SystemSharedMemoryStatusRequest.FromString(message)

    async def answer(self, request: Any, caller: Caller) -> Any:
        response = self.response()
        for region in self.extension.regions.listed(self.memory_kind, request.name):
            entry = response.RegionStatus(name=region.name, **region.status)
            response.regions[region.name].CopyFrom(entry)
        return response


class CudaStatusMethod(SystemStatusMethod):
    name = f"{_SERVICE}/CudaSharedMemoryStatus"
    memory_kind = "cuda"
    response = pb.CudaSharedMemoryStatusResponse

    @staticmethod
    def parse(message: bytes) -> Any:
        return pb.CudaSharedMemoryStatusRequest.FromString(message)


class SystemUnregisterMethod(GrpcMethod):
    name = f"{_SERVICE}/SystemSharedMemoryUnregister"
    operation = Operation.SHARED_MEMORY_UNREGISTER
    extension: RegionExtension
    memory_kind: ClassVar[Kind] = "system"

    @staticmethod
    def parse(message: bytes) -> Any:
        return pb.SystemSharedMemoryUnregisterRequest.FromString(message)

    async def answer(self, request: Any, caller: Caller) -> bytes:
        caller.note(kind=self.memory_kind, region=request.name)
        await self.extension.unregister(self.memory_kind, request.name)
        return b""  # the response has no fields


class CudaUnregisterMethod(SystemUnregisterMethod):
    name = f"{_SERVICE}/CudaSharedMemoryUnregister"
    memory_kind = "cuda"

    @staticmethod
    def parse(message: bytes) -> Any:
        return pb.CudaSharedMemoryUnregisterRequest.FromString(message)


class SystemRegisterMethod(GrpcMethod):
    name = f"{_SERVICE}/SystemSharedMemoryRegister"
    operation = Operation.SHARED_MEMORY_REGISTER
    extension: RegionExtension

    @staticmethod
    def parse(message: bytes) -> pb.SystemSharedMemoryRegisterRequest:
        return pb.SystemSharedMemoryRegisterRequest.FromString(message)

    async def answer(self, request: pb.SystemSharedMemoryRegisterRequest, caller: Caller) -> bytes:
        self.extension.require_allowed()
        size, offset = request.byte_size, request.offset
        caller.note(kind="system", region=request.name, key=request.key, offset=offset, byte_size=size)
        await self.extension.register_system(request.name, request.key, offset, size)
        return b""


class CudaRegisterMethod(GrpcMethod):
    name = f"{_SERVICE}/CudaSharedMemoryRegister"
    operation = Operation.SHARED_MEMORY_REGISTER
    extension: RegionExtension

    @staticmethod
    def parse(message: bytes) -> pb.CudaSharedMemoryRegisterRequest:
        return pb.CudaSharedMemoryRegisterRequest.FromString(message)

    async def answer(self, request: pb.CudaSharedMemoryRegisterRequest, caller: Caller) -> bytes:
        self.extension.require_allowed()
        caller.note(kind="cuda", region=request.name, device=request.device_id, byte_size=request.byte_size)
        await self.extension.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return b""
