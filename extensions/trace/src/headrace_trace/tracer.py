"""The interceptor that traces requests, and the state of tracing of one server."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakSet

from headrace import AnyOperation, Caller, InferRequest, Interceptor, ModelView, Operation, ServerOptions
from headrace_trace.exporter import Exporter
from headrace_trace.recording import OPEN, RequestTrace, TracedCall
from headrace_trace.settings import SettingsTable
from headrace_trace.start_settings import read_options

#: The tracers of all servers of this process that trace.
TRACERS: WeakSet[Tracer] = WeakSet()


def tracer_of(options: ServerOptions) -> Tracer | None:
    """Return the tracer of the server with ``options``; None if it does not trace."""
    return next((tracer for tracer in TRACERS if tracer.options is options), None)


def file_of(path: str, options: ServerOptions) -> str:
    """Return the trace file of this process: ``path``, or with several ``--workers`` a file for each."""
    return f"{path}.{os.getpid()}" if options.workers > 1 else path


class Tracer(Interceptor):
    """Traces the sampled inferences of one server. Not enabled without a place for traces: then it costs nothing."""

    name = "trace"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.start = read_options(options)
        self.table = SettingsTable(self.start.settings, self._count_anew)
        self.exporter: Exporter | None = None
        if not self.enabled:
            return
        if self.start.settings.mode == "opentelemetry":
            from headrace_trace.span_sender import SpanSender

            self.exporter = SpanSender(self.start)
            self.follows_trace_context = True
        else:
            from headrace_trace.trace_file import TraceFiles

            self.exporter = TraceFiles(file_of(self.start.settings.file, options))
        TRACERS.add(self)

    @property
    def enabled(self) -> bool:
        return self.start.may_trace

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str:
        return ""

    def close(self) -> None:
        """Write what is left. Blocks for at most a few seconds."""
        TRACERS.discard(self)
        if self.exporter is not None:
            self.exporter.close()

    def samples(self, operation: AnyOperation, model: Callable[[], str], traceparent: str) -> bool:
        if operation is not Operation.INFER and operation is not Operation.GENERATE:
            return False
        table = self.table
        is_forced = bool(traceparent) and self._follows(traceparent)
        if table.models:
            return table.of(model()).sample(is_forced)
        if self.spared and not is_forced:  # core calls it also beside other interceptors, or for an invalid context
            self.spared -= 1
            return False
        is_taken = table.whole.sample(is_forced)
        if not self.spared:
            self.spared = table.whole.spare()
        return is_taken

    def _count_anew(self) -> None:
        self.spared = 0

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> TracedCall | None:
        assert self.exporter is not None
        if caller.transport == "model":
            parent = None if caller.parent is None else OPEN.get(caller.parent)
            if parent is None:
                return None
            call = TracedCall(caller, model, parent.trace, parent)
        else:
            sampler = self.table.of(model)
            call = TracedCall(caller, model, RequestTrace(sampler, self._collect))
            call.arrived()
        self.exporter.begin(call, caller)
        return call

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> None:
        call = OPEN.get(caller)
        if call is not None:
            call.submitted(request, model)

    def _follows(self, traceparent: str) -> bool:
        assert self.exporter is not None
        return self.exporter.follows(traceparent)

    def _collect(self, trace: RequestTrace) -> None:
        trace.sampler.collected += 1
        if self.exporter is not None:
            self.exporter.export(trace)
