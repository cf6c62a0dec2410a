"""Triton's logging extension, an access log (``--access-log-file``) and an audit log (``--audit-log-file``)."""

from __future__ import annotations

from headrace import Extension, Interceptor, Observer, OptionGroup, ServedModel, Server, ServerOptions, hookimpl
from headrace_logging.access_log import AccessLog, AccessLogFile, ExecutionTimes, SampledAccessLog
from headrace_logging.access_options import AccessLogOptions
from headrace_logging.audit_log import AuditLog, AuditLogFile, ServerEvents
from headrace_logging.audit_options import AuditLogOptions
from headrace_logging.log_settings import Logging

__all__ = ["AccessLogOptions", "AuditLogOptions", "Logging"]

_EVENTS = ServerEvents()


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [AccessLogOptions, AuditLogOptions]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Logging, AccessLogFile, AuditLogFile]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [AccessLog, SampledAccessLog, AuditLog]


@hookimpl
def observe_model(model: ServedModel, options: ServerOptions) -> Observer | None:
    access = options.group(AccessLogOptions)
    _EVENTS.observe(model, options.group(AuditLogOptions))
    return ExecutionTimes(access.running) if access.file else None


@hookimpl
def model_loaded(model: ServedModel) -> None:
    _EVENTS.model("model_loaded", model)


@hookimpl
def model_unloaded(model: ServedModel) -> None:
    _EVENTS.model("model_unloaded", model)


@hookimpl
def server_started(server: Server) -> None:
    _EVENTS.started(server)


@hookimpl
def server_stopping(server: Server) -> None:
    _EVENTS.stopping(server)
