"""Prometheus metrics over HTTP (behaviours.md section 7), on the native host of the HTTP frontend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from prometheus_client import CollectorRegistry

from penstock.frontends.base import Frontend
from penstock.frontends.http.connections import Connections
from penstock.frontends.http.limits import Limits
from penstock.frontends.http.listening import listen
from penstock.frontends.http.message import HttpReply, HttpRequest, Reply, text_error
from penstock.frontends.http.protocol import HttpProtocol
from penstock.telemetry import exposition
from penstock.telemetry.gpu import GpuCollector
from penstock.telemetry.host import HostCollector, PinnedPoolCollector
from penstock.telemetry.metrics import ModelCollector

log = logging.getLogger(__name__)

_TEXT = ((b"Content-Type", exposition.CONTENT_TYPE.encode()),)


@dataclass(frozen=True, slots=True)
class _Limits(Limits):
    """Nobody has a reason to send a body here, whatever its path and headers say."""

    input_bytes: int = 1024

    def body_limit(self, path: str, headers: Mapping[bytes, bytes]) -> int:
        return self.input_bytes


class MetricsFrontend(Frontend):
    """``GET /metrics``. ``port`` is the one that is listened on, once started.

    Everything is read when it is asked for, which takes about 0.3 ms of the event loop per model.
    """

    name: ClassVar[str] = "metrics"
    port: int = 0
    _acceptor: asyncio.Server | None = None

    @property
    def enabled(self) -> bool:
        return self.server.options.allow_metrics

    async def start(self) -> None:
        options = self.server.options
        self._registry = self._collectors()
        listener = listen(options.metrics_address, options.metrics_port, is_shared=False)
        self.port = listener.getsockname()[1]
        self._connections = connections = Connections(self._answer, _Limits())
        loop = asyncio.get_running_loop()
        self._acceptor = await loop.create_server(lambda: HttpProtocol(connections), sock=listener)
        connections.watch()
        log.info("Started Metrics Service at %s:%d", options.metrics_address, self.port)

    async def stop(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
            await self._connections.drain()

    def _collectors(self) -> CollectorRegistry:
        server, options = self.server, self.server.options
        registry = CollectorRegistry()
        registry.register(ModelCollector(server.served, server.metrics, server.summaries))
        registry.register(PinnedPoolCollector(options.pinned_memory_pool_byte_size))
        if options.allow_cpu_metrics and HostCollector.is_possible():
            registry.register(HostCollector(options.metrics_interval_ms / 2000))
        if options.allow_gpu_metrics:
            registry.register(GpuCollector())
        return registry

    def _answer(self, request: HttpRequest, reply: Reply) -> None:
        """As Triton: a path that is not known is an empty success."""
        if request.method != "GET":
            reply(text_error(405, "Method Not Allowed"))
        elif request.path in ("/metrics", "/metrics/"):
            reply(HttpReply(200, _TEXT, (exposition.text(self._registry.collect()).encode(),)))
        else:
            reply(HttpReply(200, _TEXT))
