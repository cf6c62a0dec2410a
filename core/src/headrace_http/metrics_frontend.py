"""Prometheus metrics over HTTP (docs/spec/behaviours.md section 7), on the native host of the HTTP frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CollectorRegistry

from headrace.config.options import ServerOptions
from headrace.engine import Operation
from headrace.frontends.base import Frontend
from headrace.frontends.listening import announce, listen_http
from headrace.telemetry import exposition
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_http.admitted_requests import AdmittedReply, caller_of
from headrace_http.caller_limits import HttpLimits, flagged
from headrace_http.machine_metrics import GpuCollector, HostCollector, PinnedPoolCollector
from headrace_http.message import Cancel, HttpReply, HttpRequest, Reply, error_reply, text_error
from headrace_http.open_connections import NativeConnections
from headrace_http.outputs import compressed, response_encoding
from headrace_http.protocol import HttpProtocol

if TYPE_CHECKING:
    from prometheus_client import Metric

    from headrace.engine import Engine, InterceptorChain

log = rate_limited_logger(__name__)

_TEXT = ((b"Content-Type", exposition.CONTENT_TYPE.encode()), (b"Vary", b"Accept-Encoding"))


@dataclass(frozen=True, slots=True)
class _Limits(HttpLimits):
    """Requests for metrics have no body, so the limit is small, whatever path and headers say."""

    input_bytes: int = 1024

    def body_limit(self, path: str, headers: Mapping[bytes, bytes]) -> int:
        return self.input_bytes


class MetricsFrontend(Frontend):
    """``GET /metrics``. ``port`` is the port in use, once started.

    Everything is read when the page is requested. The event loop adds up the statistics, in about 0.3 ms per model. A
    thread prints the page, compresses it if the client accepts that, and reads the devices, whose drivers may block.
    """

    name: ClassVar[str] = "metrics"
    port: int = 0
    _acceptor: asyncio.Server | None = None

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._pages: set[asyncio.Task[None]] = set()

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_metrics

    async def start(self) -> None:
        options = self.engine.options
        self._devices = await asyncio.to_thread(_devices, options)
        listener = listen_http(options.metrics_address, options.metrics_port, is_shared=False, service="metrics")
        self.port = listener.getsockname()[1]
        admission = self.engine.admission
        self._connections = connections = NativeConnections(
            self._answer if admission is None else partial(self._admit, admission),
            _Limits(**flagged(options)),
            self.engine.off_loop_work,
        )
        loop = asyncio.get_running_loop()
        self._acceptor = await loop.create_server(lambda: HttpProtocol(connections), sock=listener)
        connections.watch()
        announce(self.engine, log, "Metrics Service", f"{options.metrics_address}:{self.port}")

    async def stop(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
            await self._connections.drain(self.engine.options.exit_timeout_secs, serves_on=False)

    async def families(self) -> Iterable[Metric]:
        """Return the metrics of the models now. Any thread may iterate over them, once."""
        return self.engine.collect()

    def _admit(self, admission: InterceptorChain, request: HttpRequest, reply: Reply) -> Cancel | None:
        admitted = AdmittedReply(reply, caller_of(request, reply, self.name))
        return admitted.begin(
            admission,
            Operation.METRICS,
            "",
            partial(self._answer, request, admitted),
            lambda error: admitted(error_reply(error)),
        )

    def _answer(self, request: HttpRequest, reply: Reply) -> None:
        """Answer ``request``. As in Triton, an unknown path is an empty success."""
        if request.method != "GET":
            reply(text_error(405, "Method Not Allowed"))
        elif request.path in ("/metrics", "/metrics/"):
            page = asyncio.get_running_loop().create_task(self._page(request, reply))
            self._pages.add(page)
            page.add_done_callback(self._pages.discard)
        else:
            reply(HttpReply(200, _TEXT))

    async def _page(self, request: HttpRequest, reply: Reply) -> None:
        try:
            encoding = response_encoding(request.headers.get(b"accept-encoding", b""))
            reply(await asyncio.to_thread(self._print, await self.families(), encoding))
        except Exception:
            log.exception("the metrics could not be read")
            reply(text_error(500, "the metrics could not be read; the log of the server has the reason"))

    def _print(self, models: Iterable[Metric], encoding: bytes) -> HttpReply:
        """Return the page, by ``encoding``. Blocks: 500 models have 61,000 lines."""
        page = (exposition.text(models).encode(), exposition.text(self._devices.collect()).encode())
        if encoding == b"identity":
            return HttpReply(200, _TEXT, page)
        return HttpReply(200, (*_TEXT, (b"Content-Encoding", encoding)), (compressed(page, encoding),))


def _devices(options: ServerOptions) -> CollectorRegistry:
    """Return the collectors of the machine. Blocks: this loads the GPU driver."""
    registry = CollectorRegistry()
    registry.register(PinnedPoolCollector(options.pinned_memory_pool_byte_size))
    if options.allow_cpu_metrics and HostCollector.is_possible():
        registry.register(HostCollector(options.metrics_interval_ms / 2000))
    if options.allow_gpu_metrics:
        registry.register(GpuCollector())
    return registry
