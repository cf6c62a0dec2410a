"""A collector of OpenTelemetry over HTTP on its own port, which stores its spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class ReceivedSpan(NamedTuple):
    name: str
    trace_id: str
    id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    links: list[str]
    resource: dict[str, Any]
    status: int


class Collector:
    """``status`` is what it answers. While ``gate`` is not set, it answers nothing."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.paths: list[str] = []
        self.status, self.body = 200, b""
        self.gate = threading.Event()
        self.gate.set()
        self._changed = threading.Condition()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
                if handler.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                self.gate.wait()
                self.receive(handler.path, body)
                handler.send_response(self.status)
                handler.send_header("Content-Length", str(len(self.body)))
                handler.end_headers()
                handler.wfile.write(self.body)

            def log_message(handler, *arguments: Any) -> None:  # noqa: N805
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def receive(self, path: str, body: bytes) -> None:
        with self._changed:
            self.paths.append(path)
            if self.status == 200:
                self.spans += read(ExportTraceServiceRequest.FromString(body))
            self._changed.notify_all()

    def wait_for(self, count: int, timeout_s: float = 60) -> list[ReceivedSpan]:
        """Wait for ``count`` spans, and return them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans) >= count, timeout_s), self.spans
            return list(self.spans)

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


def read(message: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    """Yield the spans of a message."""
    for of_resource in message.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _values(span.attributes),
                    [event.name for event in span.events],
                    [link.span_id.hex() for link in span.links],
                    resource,
                    span.status.code,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()
