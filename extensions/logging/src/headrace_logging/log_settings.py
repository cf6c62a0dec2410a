"""Triton's logging extension: the settings of the log, read and changed while the server runs.

Source: docs/spec/behaviours.md section 12.2. A change with one wrong setting changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from headrace import (
    Addition,
    Caller,
    Engine,
    Extension,
    GrpcMethod,
    HttpCall,
    HttpReply,
    HttpRoute,
    InvalidArgument,
    Log,
    LogSettings,
    Operation,
    Unavailable,
    Unsupported,
    grpc_service_pb2,
)

_JSON = ((b"Content-Type", b"application/json"),)
_FORMATS = ("default", "ISO8601")
#: The fields of `LogSettings`, by their names in Triton and in Triton's order.
_FIELDS = {
    "log_file": "file",
    "log_info": "info",
    "log_warning": "warning",
    "log_error": "error",
    "log_verbose_level": "verbose_level",
    "log_format": "format",
}
#: The types of the values in JSON that are not booleans.
_KINDS: dict[str, type[int] | type[str]] = {"log_verbose_level": int, "log_format": str}


class ReadSettings(HttpRoute):
    name = "GET /v2/logging"
    operation = Operation.LOG_SETTINGS
    extension: Logging

    async def answer(self, call: HttpCall) -> HttpReply:
        return HttpReply(200, _JSON, [json.dumps(self.extension.settings(), separators=(",", ":")).encode()])


class ChangeSettings(ReadSettings):
    name = "POST /v2/logging"

    async def answer(self, call: HttpCall) -> HttpReply:
        document = await call.read_json()
        members = document if isinstance(document, dict) else {}
        changes = {name: members[name] for name in _FIELDS if members.get(name) is not None}
        for name, value in changes.items():
            if name != "log_file":
                call.read_value(value, _KINDS.get(name, bool))
        if changes:
            call.caller.note(settings=changes)
        await self.extension.change(
            changes, lambda found: Unavailable(f"invalid argument for --log_format, got: {found}")
        )
        return await super().answer(call)


class LogSettingsMethod(GrpcMethod):
    name = "/inference.GRPCInferenceService/LogSettings"
    operation = Operation.LOG_SETTINGS
    extension: Logging

    @staticmethod
    def parse(message: bytes) -> grpc_service_pb2.LogSettingsRequest:
        return grpc_service_pb2.LogSettingsRequest.FromString(message)

    async def answer(self, request: grpc_service_pb2.LogSettingsRequest, caller: Caller) -> Any:
        changes: dict[str, Any] = {}
        for name, setting in request.settings.items():
            if name in _FIELDS:
                changes[name] = _value(name, setting)
        if changes:
            caller.note(settings=changes)
        refusal = "invalid argument for log_format, got: "
        await self.extension.change(changes, lambda found: InvalidArgument(f"{refusal}{found}"))
        response = grpc_service_pb2.LogSettingsResponse()
        for name, value in self.extension.settings().items():
            setattr(response.settings[name], _parameter(name), value)
        return response


class Logging(Extension):
    name = "logging"
    announces = ("logging",)
    adds: ClassVar[tuple[type[Addition], ...]] = (ReadSettings, ChangeSettings, LogSettingsMethod)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._log = engine.log

    @property
    def log(self) -> Log:
        """The log of the server. Raises `Unsupported` if another program has configured logging."""
        if self._log is None:
            raise Unsupported("this server is a part of another program, which configures the log")
        return self._log

    def settings(self) -> dict[str, Any]:
        """Return the settings by their names in Triton."""
        return {name: getattr(self.log.settings, field) for name, field in _FIELDS.items()}

    async def change(self, changes: Mapping[str, Any], wrong_format: Callable[[str], Exception]) -> None:
        """Apply ``changes``, whose values have the right types, in all workers. Raises before anything changes."""
        if "log_file" in changes:
            raise Unsupported("log file location can not be updated through network protocol")
        if "log_format" in changes and changes["log_format"] not in _FORMATS:
            raise wrong_format(changes["log_format"])
        for name, value in changes.items():
            await self.engine.share(self, name, {name: value})

    async def apply(self, change: Mapping[str, Any]) -> None:
        changed: LogSettings = replace(self.log.settings, **{_FIELDS[name]: value for name, value in change.items()})
        self.log.change(changed)


def _parameter(name: str) -> str:
    """Return the field of a gRPC setting that has the value of ``name``."""
    return {"log_file": "string_param", "log_format": "string_param", "log_verbose_level": "uint32_param"}.get(
        name, "bool_param"
    )


def _value(name: str, setting: Any) -> Any:
    """Return the value of a gRPC setting. Raises `InvalidArgument` for the wrong type."""
    parameter = _parameter(name)
    if name != "log_file" and setting.WhichOneof("parameter_choice") != parameter:
        word = {"string_param": "string", "uint32_param": "int32", "bool_param": "boolean"}[parameter]
        raise InvalidArgument(f"expect {word} for '{name}'")
    return getattr(setting, parameter)
