"""Prometheus metrics over HTTP (docs/spec/behaviours.md section 7), on the native host of the HTTP frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from headrace.engine import AnyOperation, Operation
from headrace.errors import ConfigError
from headrace_hosts.tls_files import TlsFiles
from headrace_http import protobuf_format, text_format
from headrace_http.frontend import HttpFrontend
from headrace_http.http_host import HttpPort
from headrace_http.machine_metrics import machine_metrics
from headrace_http.message import HttpReply, text_error
from headrace_http.outputs import compressed, response_encoding
from headrace_http.plugin_routes import HttpCall, HttpRoute

if TYPE_CHECKING:
    from prometheus_client import Metric

#: The path of the page.
METRICS_PATH = "/metrics"
_KIND = (b"Content-Type", text_format.CONTENT_TYPE.encode())
_TEXT = (_KIND, (b"Vary", b"Accept-Encoding"))
#: With ``native_histograms``: of a page in text, and of one in protobuf.
_CHOSEN = (b"Vary", b"Accept, Accept-Encoding")
_CHOSEN_TEXT = (_KIND, _CHOSEN)
_PROTOBUF = ((b"Content-Type", protobuf_format.CONTENT_TYPE.encode()), _CHOSEN)


class MetricsPage(HttpRoute):
    """The page, for every path: as in Triton, an unknown one is an empty success."""

    name: ClassVar[str] = "GET /metrics"
    operation: ClassVar[AnyOperation] = Operation.METRICS
    extension: MetricsFrontend

    async def answer(self, call: HttpCall) -> HttpReply:
        request = call.request
        if request.method != "GET":
            return text_error(405, "Method Not Allowed")
        if request.path not in ("/metrics", "/metrics/"):
            return HttpReply(200, _TEXT)
        encoding = response_encoding(request.headers.get(b"accept-encoding", b""))
        return await self.extension.page(encoding, protobuf_format.is_accepted(request.headers.get(b"accept", b"")))


class MetricsFrontend(HttpPort):
    """``GET /metrics``, always on the native host, and without TLS unless ``--metrics-use-ssl`` is set.

    Everything is read when the page is requested. The event loop adds up the statistics, in about 0.3 ms per model. A
    thread prints the page, compresses it if the client accepts that, and reads the devices, whose drivers may block.
    """

    name: ClassVar[str] = "metrics"
    service: ClassVar[str] = "Metrics Service"
    otherwise: ClassVar[type[HttpRoute] | None] = MetricsPage
    serves_on: ClassVar[bool] = False
    host = HttpFrontend
    max_body_bytes = 1024  # requests for metrics have no body

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_metrics

    @property
    def tls(self) -> TlsFiles | None:
        options = self.engine.options
        if options.metrics_use_ssl and not options.http_use_ssl:
            raise ConfigError("--metrics-use-ssl needs --http-use-ssl and its files")
        return super().tls if options.metrics_use_ssl else None

    @property
    def place(self) -> tuple[str, int]:
        return self.engine.options.metrics_address, self.engine.options.metrics_port

    async def start(self) -> None:
        await self.prepare()
        await super().start()

    async def prepare(self) -> None:
        """Find the devices of the machine. Needed before the first page."""
        config = self.engine.options.metrics_config
        self._has_native = config.get("native_histograms") == "true"
        self._devices = await asyncio.to_thread(machine_metrics, self.engine.options)

    async def families(self) -> Iterable[Metric]:
        """Return the metrics of the models now. Any thread may iterate over them, once."""
        return self.engine.collect()

    async def page(self, encoding: bytes, takes_protobuf: bool = False) -> HttpReply:
        """Return the page, by ``encoding``. With ``native_histograms``, in protobuf for a client that takes it."""
        is_native = takes_protobuf and self._has_native
        return await asyncio.to_thread(self._print, await self.families(), encoding, is_native)

    def _print(self, models: Iterable[Metric], encoding: bytes, is_native: bool) -> HttpReply:
        """Return the page, by ``encoding``. Blocks: 500 models have 61,000 lines."""
        devices = list(self._devices())
        if is_native:
            headers, page = _PROTOBUF, tuple(map(protobuf_format.write, (models, devices)))
        else:
            headers = _CHOSEN_TEXT if self._has_native else _TEXT
            page = tuple(text_format.text(each).encode() for each in (models, devices))
        if encoding == b"identity":
            return HttpReply(200, headers, page)
        return HttpReply(200, (*headers, (b"Content-Encoding", encoding)), (compressed(page, encoding),))
