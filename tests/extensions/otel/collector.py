"""A collector of OpenTelemetry over HTTP and gRPC, which decodes by the classes of OpenTelemetry."""

from __future__ import annotations

import gzip
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

#: The labels of a series and its value; of a histogram, a pair of its count and sum.
Series = dict[tuple[str, frozenset[tuple[str, str]]], Any]


class Collector:
    """``status``, ``headers`` and ``body`` are its answer over HTTP. While ``gate`` is not set, it answers nothing.

    With ``key`` and ``certificate``, files of PEM, it answers over TLS.
    """

    def __init__(self, key: Path | None = None, certificate: Path | None = None) -> None:
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.logs: list[ExportLogsServiceRequest] = []
        self.heads: list[dict[str, str]] = []
        self.times: list[float] = []
        self.status, self.headers, self.body = 200, dict[str, str](), b""
        self.gate = threading.Event()
        self.gate.set()
        self._changed = threading.Condition()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:  # noqa: N805
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                self.gate.wait()
                self.times.append(time.monotonic())
                if self.status == 200:
                    self.receive(handler.path, gzip.decompress(body), dict(handler.headers))
                handler.send_response(self.status)
                for name, value in {"Content-Length": str(len(self.body)), **self.headers}.items():
                    handler.send_header(name, value)
                handler.end_headers()
                try:
                    handler.wfile.write(self.body)
                except OSError:
                    handler.close_connection = True

            def log_message(handler, *arguments: Any) -> None:  # noqa: N805
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(server, *arguments: Any) -> None:  # noqa: N805
                """Say nothing of a connection that a server has reset when it stopped."""

        self._http = Server(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        if key is not None and certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self.http = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._grpc = grpc.server(ThreadPoolExecutor(2), [self._handlers()])
        if key is not None and certificate is not None:
            credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
            port = self._grpc.add_secure_port("127.0.0.1:0", credentials)
        else:
            port = self._grpc.add_insecure_port("127.0.0.1:0")
        self.grpc = f"http://127.0.0.1:{port}"
        self._grpc.start()

    def _handlers(self) -> Any:
        collector = self

        class Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
            def service(self, details: Any) -> Any:
                def export(message: bytes, context: Any) -> bytes:
                    collector.receive(details.method, message, dict(context.invocation_metadata()))
                    return b""

                return grpc.unary_unary_rpc_method_handler(export)

        return Handlers()

    def receive(self, path: str, message: bytes, head: dict[str, str]) -> None:
        with self._changed:
            self.heads.append(head)
            if path in ("/v1/metrics", "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"):
                self.metrics.append(ExportMetricsServiceRequest.FromString(message))
            elif path in ("/v1/logs", "/opentelemetry.proto.collector.logs.v1.LogsService/Export"):
                self.logs.append(ExportLogsServiceRequest.FromString(message))
            else:
                raise AssertionError(path)
            self._changed.notify_all()

    def wait_for(self, is_enough: Callable[[], Any], timeout_s: float = 30) -> Any:
        """Return what ``is_enough`` returns when it is true."""
        with self._changed:
            assert self._changed.wait_for(is_enough, timeout_s), "the collector has not got it"
            return is_enough()

    def records(self, scope: str = "") -> list[Any]:
        """Return the log records of a scope, or of all but access records."""
        return [
            record
            for message in tuple(self.logs)
            for of_resource in message.resource_logs
            for of_scope in of_resource.scope_logs
            if of_scope.scope.name == scope or (not scope and of_scope.scope.name != "headrace.access")
            for record in of_scope.log_records
        ]

    def instances(self) -> set[str]:
        return {
            values(each.resource.attributes)["service.instance.id"]
            for message in tuple(self.metrics)
            for each in message.resource_metrics
        }

    def close(self) -> None:
        self.gate.set()
        self._http.shutdown()
        self._http.server_close()
        self._grpc.stop(None)


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def series(messages: list[ExportMetricsServiceRequest]) -> Series:
    """Return the last value of each series."""
    found: Series = {}
    for message in tuple(messages):
        for metric in (m for r in message.resource_metrics for s in r.scope_metrics for m in s.metrics):
            kind = str(metric.WhichOneof("data"))
            for point in getattr(metric, kind).data_points:
                labels = frozenset(values(point.attributes).items())
                if kind in ("sum", "gauge"):
                    found[metric.name, labels] = getattr(point, point.WhichOneof("value"))
                else:
                    found[metric.name, labels] = (point.count, point.sum)
    return found


@contextmanager
def collecting(key: Path | None = None, certificate: Path | None = None) -> Iterator[Collector]:
    collector = Collector(key, certificate)
    try:
        yield collector
    finally:
        collector.close()
