"""Tracing for Headrace: Triton's trace files and settings, OpenTelemetry, and the command ``headrace trace``.

::

    Tracer      an interceptor: samples requests, and records what happens to them   (tracer, recording)
    Exporter    writes traces to Triton's files, or sends them as spans              (trace_file, spans)
    Trace       an extension: the settings over HTTP and gRPC, and metrics           (trace_extension, settings)
    headrace trace FILE                                                             (trace_command, waterfall)
"""

from __future__ import annotations

from headrace import Command, Extension, Interceptor, Server, hookimpl
from headrace_trace.trace_command import TraceCommand
from headrace_trace.trace_extension import Trace
from headrace_trace.tracer import Tracer, tracer_of


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Trace]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [Tracer]


@hookimpl
def register_commands() -> list[type[Command]]:
    return [TraceCommand]


@hookimpl
def server_started(server: Server) -> None:
    """Make the extension, which closes the trace files, also in a server without frontends."""
    if tracer_of(server.options) is not None:
        _ = server.engine.extensions
