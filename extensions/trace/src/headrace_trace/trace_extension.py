"""Triton's trace extension: the settings of tracing, read and changed while the server runs, and its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from headrace import (
    Addition,
    Caller,
    Engine,
    Extension,
    GrpcMethod,
    HeadraceError,
    HttpCall,
    HttpReply,
    HttpRoute,
    InvalidArgument,
    Operation,
    PublishedMetric,
    grpc_service_pb2,
)
from headrace_trace.setting_changes import read_document, read_message
from headrace_trace.settings import Changes, SettingsTable
from headrace_trace.start_settings import read_options, without_user
from headrace_trace.tracer import tracer_of

#: A message of millions of settings would take long to parse.
_MAX_BYTES = 1 << 16
_JSON = ((b"Content-Type", b"application/json"),)


class ReadTraceSettings(HttpRoute):
    name = "GET /v2[/models/{name}]/trace/setting"
    operation = Operation.TRACE_SETTINGS
    extension: Trace

    async def answer(self, call: HttpCall) -> HttpReply:
        model = call.values.get("name", "")
        await self.extension.require(model)
        body = json.dumps(self.extension.settings(model), separators=(",", ":")).encode()
        return HttpReply(200, _JSON, [body])


class ChangeTraceSettings(ReadTraceSettings):
    name = "POST /v2[/models/{name}]/trace/setting"

    async def answer(self, call: HttpCall) -> HttpReply:
        model = call.values.get("name", "")
        await self.extension.require(model)
        document = await call.read_json()
        changes = read_document(document if isinstance(document, dict) else {})
        if changes:
            call.caller.note(settings=changes)
        await self.extension.change(model, changes)
        return await super().answer(call)


class TraceSettingMethod(GrpcMethod):
    name = "/inference.GRPCInferenceService/TraceSetting"
    operation = Operation.TRACE_SETTINGS
    model_field = (2, "model_name")
    extension: Trace

    @staticmethod
    def parse(message: bytes) -> grpc_service_pb2.TraceSettingRequest:
        if len(message) > _MAX_BYTES:
            raise InvalidArgument(f"trace settings of {len(message)} bytes: the limit is {_MAX_BYTES}")
        return grpc_service_pb2.TraceSettingRequest.FromString(message)

    async def answer(self, request: grpc_service_pb2.TraceSettingRequest, caller: Caller) -> Any:
        await self.extension.require(request.model_name)
        settings = {name: list(setting.value) for name, setting in request.settings.items()}
        changes = read_message(settings)
        if changes:
            caller.note(settings=changes)
        await self.extension.change(request.model_name, changes)
        response = grpc_service_pb2.TraceSettingResponse()
        for name, value in self.extension.settings(request.model_name).items():
            response.settings[name].value.extend([value] if isinstance(value, str) else value)
        return response


class Trace(Extension):
    name = "trace"
    announces = ("trace",)
    adds: ClassVar[tuple[type[Addition], ...]] = (ReadTraceSettings, ChangeTraceSettings, TraceSettingMethod)
    metrics = (
        PublishedMetric("headrace_trace_written_total", "Traced requests that were written or sent.", "counter"),
        PublishedMetric("headrace_trace_dropped_total", "Traced requests that were dropped.", "counter"),
    )

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._tracer = tracer_of(engine.options)
        self._start = read_options(engine.options)
        self.table = SettingsTable(self._start.settings) if self._tracer is None else self._tracer.table

    async def require(self, model: str) -> None:
        """Raise `InvalidArgument` if there is no such model; empty is the server."""
        if model and not await self._is_ready(model):
            raise InvalidArgument(f"Request for unknown model : {model}")

    async def _is_ready(self, model: str) -> bool:
        try:
            return await self.engine.is_model_ready(model)
        except HeadraceError:
            return False

    def settings(self, model: str) -> dict[str, Any]:
        """Return the settings of a model, or of the server, by their names in Triton."""
        sampler = self.table.of(model)
        settings = sampler.settings
        shown: dict[str, Any] = {
            "trace_level": list(settings.level) or ["OFF"],
            "trace_rate": str(settings.rate),
            "trace_count": str(sampler.left),
        }
        if settings.mode == "triton":
            return {
                **shown,
                "log_frequency": str(settings.log_frequency),
                "trace_file": settings.file,
                "trace_mode": settings.mode,
            }
        exporter = {name: without_user(value) for name, value in self._start.exporter.items()}
        shown |= {"trace_mode": settings.mode, **exporter}
        if self._start.resource:
            shown["resource"] = ",".join(f"{name}={value}" for name, value in self._start.resource.items())
        return shown

    async def change(self, model: str, fields: Mapping[str, Any]) -> None:
        """Change settings of ``model``, empty for the server, in all workers. Raises `InvalidArgument` before anything
        changes. ``fields`` has None for a setting that falls back."""
        if fields:
            changes = vars(self.table.merged(model, fields))
            await self.engine.share(self, model, {"model": model, "counts_anew": "count" in fields, **changes})

    async def apply(self, change: Mapping[str, Any]) -> None:
        changes = {name: value for name, value in change.items() if name not in ("model", "counts_anew")}
        if changes["level"] is not None:
            changes["level"] = tuple(changes["level"])
        self.table.apply(change["model"], Changes(**changes), change["counts_anew"])

    def measure(self) -> Mapping[str, float]:
        exporter = None if self._tracer is None else self._tracer.exporter
        return {
            "headrace_trace_written_total": 0 if exporter is None else exporter.written,
            "headrace_trace_dropped_total": 0 if exporter is None else exporter.dropped,
        }

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
