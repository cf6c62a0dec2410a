"""Sends spans to a collector, by the exporters of OpenTelemetry's SDK, on its own thread.

Requests never wait for the collector: if the queue is full, a trace is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headrace import Caller, ConfigError, rate_limited_logger
from headrace_trace import trace_context
from headrace_trace.recording import RequestTrace, TracedCall
from headrace_trace.start_settings import StartSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = rate_limited_logger(__name__)

#: The longest time that the end of the server waits for the collector.
_CLOSE_S = 5.0
_TIMEOUT_S = 5.0
_CREDENTIAL_PROVIDERS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)


class SpanSender:
    """Takes the traces of one server. Raises `ConfigError` if OpenTelemetry is not installed."""

    def __init__(self, start: StartSettings) -> None:
        self.written = self.dropped = 0
        try:
            from headrace_trace.spans import SpanMaker

            self._maker = SpanMaker(start.resource)
            self._exporter = _exporter(start)
        except ImportError as error:
            raise ConfigError(
                f"--trace-config=mode=opentelemetry: {error}: pip install 'headrace-trace[opentelemetry]'"
            ) from error
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._success = SpanExportResult.SUCCESS
        # The exporters write a line, or a traceback, for each failure.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._most_sent, self._delay_s = start.most_sent, start.send_delay_s
        self._waiting: queue.Queue[RequestTrace | None] = queue.Queue(start.most_queued)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-trace", daemon=True)
        self._thread.start()

    def follows(self, traceparent: str) -> bool:
        return trace_context.parse(traceparent) is not None

    def begin(self, call: TracedCall, caller: Caller) -> None:
        parent = call.parent
        context = (
            trace_context.of_client(caller.trace_context) if parent is None else trace_context.of_model(parent.context)
        )
        call.context = context
        caller.trace_context = context.headers()

    def export(self, trace: RequestTrace) -> None:
        try:
            self._waiting.put_nowait(trace)
        except queue.Full:
            trace.free()
            self._drop(1, "the queue is full: it takes them more slowly than they are made")

    def close(self) -> None:
        self._is_closing.set()
        with suppress(queue.Full):  # then the thread does not wait
            self._waiting.put_nowait(None)
        self._thread.join(_CLOSE_S)

    def _drop(self, count: int, reason: str) -> None:
        self.dropped += count
        log.warning("traces for the collector are dropped: %s", reason)

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while not self._is_closing.is_set() or not self._waiting.empty():
            traces = self._next()
            if traces:
                self._send(traces)
        self._exporter.shutdown()

    def _next(self) -> list[RequestTrace]:
        """Return the traces that arrive within the delay, at most as many as are sent at once."""
        found: list[RequestTrace] = []
        until = 0.0
        while len(found) < self._most_sent:
            left_s = until - time.monotonic() if found else None
            if left_s is not None and (left_s <= 0 or self._is_closing.is_set()):
                left_s = 0.0
            try:
                trace = self._waiting.get(timeout=left_s) if left_s != 0.0 else self._waiting.get_nowait()
            except queue.Empty:
                break
            if trace is None:
                break
            if not found:
                until = time.monotonic() + self._delay_s
            found.append(trace)
        return found

    def _send(self, traces: list[RequestTrace]) -> None:
        spans: list[ReadableSpan] = []
        for trace in traces:
            try:
                spans += self._maker.spans(trace)
            except Exception:
                self.dropped += 1
                log.exception("a trace is dropped")
            finally:
                trace.free()
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # of a collector that answers rubbish
            self._drop(len(traces), f"{type(error).__name__}: {error}")
            return
        if result is self._success:
            self.written += len(traces)
        else:
            self._drop(len(traces), "it is not there, or does not take them")


def _exporter(start: StartSettings) -> Any:
    """Return the exporter for the protocol of ``start``. Raises `ConfigError` and ImportError."""
    url = start.exporter.get("url") or None
    protocol = start.exporter.get("protocol") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from headrace_trace.collector_session import CollectorSession

        # The SDK makes a session with the credentials of the user if one of these names a provider.
        is_theirs = any(name in os.environ for name in _CREDENTIAL_PROVIDERS)
        return OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S, session=None if is_theirs else CollectorSession())
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc(endpoint=url, timeout=_TIMEOUT_S)
    raise ConfigError(
        f"--trace-config: invalid argument for opentelemetry,protocol, got: {protocol}; expected http/protobuf or grpc"
    )
