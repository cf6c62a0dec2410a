"""Triton's logging extension, an access log (``--access-log-file``) and an audit log (``--audit-log-file``)."""

from __future__ import annotations

from headrace import Extension, Interceptor, OptionGroup, hookimpl
from headrace_logging.access_log import AccessLog, AccessLogFile, SampledAccessLog
from headrace_logging.access_options import AccessLogOptions
from headrace_logging.audit_log import AuditLog, AuditLogFile
from headrace_logging.audit_options import AuditLogOptions
from headrace_logging.log_settings import Logging

__all__ = ["AccessLogOptions", "AuditLogOptions", "Logging"]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [AccessLogOptions, AuditLogOptions]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Logging, AccessLogFile, AuditLogFile]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [AccessLog, SampledAccessLog, AuditLog]
