"""Triton's logging extension, and an access log (``--access-log-file``)."""

from __future__ import annotations

from headrace import Extension, Interceptor, Observer, OptionGroup, ServedModel, ServerOptions, hookimpl
from headrace_logging.access_log import AccessLog, AccessLogFile, ExecutionTimes, SampledAccessLog
from headrace_logging.access_options import AccessLogOptions
from headrace_logging.log_settings import Logging

__all__ = ["AccessLogOptions", "Logging"]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [AccessLogOptions]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Logging, AccessLogFile]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [AccessLog, SampledAccessLog]


@hookimpl
def observe_model(model: ServedModel, options: ServerOptions) -> Observer | None:
    access = options.group(AccessLogOptions)
    return ExecutionTimes(access.running) if access.file else None
