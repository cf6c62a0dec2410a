"""The paths of shared memory over HTTP."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any, ClassVar

from headrace import Code, HttpCall, HttpReply, HttpRoute, InvalidArgument, Operation
from headrace_engines import IPC_HANDLE_BYTES
from headrace_shm.regions import Kind
from headrace_shm.registration import RegionExtension

_JSON = ((b"Content-Type", b"application/json"),)
_DONE = HttpReply(200, _JSON, [])


class SystemStatus(HttpRoute):
    name = "GET /v2/systemsharedmemory[/region/{name}]/status"
    operation = Operation.SHARED_MEMORY_STATUS
    extension: RegionExtension
    memory_kind: ClassVar[Kind] = "system"

    async def answer(self, call: HttpCall) -> HttpReply:
        found = self.extension.regions.listed(self.memory_kind, call.values["name"])
        document = [{"name": region.name, **region.status} for region in found]
        return HttpReply(200, _JSON, [json.dumps(document, separators=(",", ":")).encode()])


class CudaStatus(SystemStatus):
    name = "GET /v2/cudasharedmemory[/region/{name}]/status"
    memory_kind = "cuda"


class SystemUnregister(HttpRoute):
    name = "POST /v2/systemsharedmemory[/region/{name}]/unregister"
    operation = Operation.SHARED_MEMORY_UNREGISTER
    extension: RegionExtension
    memory_kind: ClassVar[Kind] = "system"

    async def answer(self, call: HttpCall) -> HttpReply:
        call.caller.note(kind=self.memory_kind, region=call.values["name"])
        await self.extension.unregister(self.memory_kind, call.values["name"])
        return _DONE


class CudaUnregister(SystemUnregister):
    name = "POST /v2/cudasharedmemory[/region/{name}]/unregister"
    memory_kind = "cuda"


class SystemRegister(HttpRoute):
    name = "POST /v2/systemsharedmemory[/region/{name}]/register"
    operation = Operation.SHARED_MEMORY_REGISTER
    extension: RegionExtension

    async def answer(self, call: HttpCall) -> HttpReply:
        name = call.values["name"]
        if not name:
            raise InvalidArgument("'region name' is necessary to register system shared memory region")
        self.extension.require_allowed()
        document = await call.read_json()
        key = call.read_value(_required(document, "key"), str)
        size = call.read_value(_required(document, "byte_size"), int)
        offset = call.read_value(document["offset"], int) if "offset" in document else 0
        call.caller.note(kind="system", region=name, key=key, offset=offset, byte_size=size)
        await self.extension.register_system(name, key, offset, size)
        return _DONE


class CudaRegister(HttpRoute):
    name = "POST /v2/cudasharedmemory[/region/{name}]/register"
    operation = Operation.SHARED_MEMORY_REGISTER
    extension: RegionExtension

    async def answer(self, call: HttpCall) -> HttpReply:
        name = call.values["name"]
        if not name:
            raise InvalidArgument("'region name' is necessary to register cuda shared memory region")
        self.extension.require_allowed()
        document = await call.read_json()
        raw_handle = _required(document, "raw_handle")
        try:
            handle = b64decode(call.read_value(_member(raw_handle, "b64"), str), validate=True)
        except ValueError:
            handle = b""
        size = call.read_value(_member(document, "byte_size"), int)
        device = call.read_value(_member(document, "device_id"), int)
        if len(handle) != IPC_HANDLE_BYTES:
            raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        call.caller.note(kind="cuda", region=name, device=device, byte_size=size)
        await self.extension.register_cuda(name, handle, device, size)
        return _DONE


def _required(document: Any, field: str) -> Any:
    """Return a field of the request. A value that is no object has no fields."""
    if type(document) is not dict or field not in document:
        raise InvalidArgument(f"Shared memory register request has no '{field}' field")
    return document[field]


def _member(document: Any, field: str) -> Any:
    if type(document) is not dict or field not in document:
        raise InvalidArgument(f"attempt to access non-existing object member '{field}'", Code.INTERNAL)
    return document[field]
