"""Trace and log settings: fixed at start for now, so these refuse (docs/spec/behaviours.md section 2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import Unsupported
from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc.context import Context

if TYPE_CHECKING:
    from headrace.engine import Engine


async def trace(engine: Engine, request: pb.TraceSettingRequest, context: Context) -> pb.TraceSettingResponse:
    if "trace_file" in request.settings:
        raise Unsupported("trace file location can not be updated through network protocol")
    raise Unsupported("tracing is not built yet: this server has no trace settings")


async def log(engine: Engine, request: pb.LogSettingsRequest, context: Context) -> pb.LogSettingsResponse:
    if "log_file" in request.settings:
        raise Unsupported("log file location can not be updated through network protocol")
    raise Unsupported("log settings can not be read or changed while the server runs; set the --log-* flags at start")
