"""Sends metrics and logs to a collector of OpenTelemetry. Traces are in headrace-trace.

::

    OtelExtension   starts and ends the two senders below                             (otel_extension)
    MetricSender    at an interval: the families of the metrics page as messages      (metric_sender, metric_messages)
    RecordSender    log lines and access records, as they arrive                      (record_sender, log_messages)
    AccessRecords   an interceptor: a record of each operation                        (access_records)
    Delivery        to the collector, over HTTP or gRPC, with pauses if it fails      (delivery, collectors)
"""

from __future__ import annotations

from headrace import (
    Extension,
    Interceptor,
    Observer,
    OptionGroup,
    ServedModel,
    Server,
    ServerOptions,
    TimeKeeper,
    hookimpl,
)
from headrace_otel.access_records import AccessRecords
from headrace_otel.otel_extension import OtelExtension
from headrace_otel.otel_options import OtelOptions

__all__ = ["OtelOptions"]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [OtelOptions]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [OtelExtension]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [AccessRecords]


@hookimpl
def observe_model(model: ServedModel, options: ServerOptions) -> Observer | None:
    return TimeKeeper() if options.group(OtelOptions).access else None


@hookimpl
def server_started(server: Server) -> None:
    """Make the extension also in a server without frontends."""
    if server.options.group(OtelOptions).is_on:
        _ = server.engine.extensions
