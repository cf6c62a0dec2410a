"""SeriesStarts the senders with the server and ends them after the last frontend; their own metrics."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from time import monotonic, time_ns
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import Metric

from headrace import Engine, Extension, PublishedMetric, machine_metrics, rate_limited_logger
from headrace_otel.otel_options import OtelOptions

if TYPE_CHECKING:
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    from headrace_otel.metric_sender import MetricSender
    from headrace_otel.record_sender import RecordSender

log = rate_limited_logger(__name__)

#: The longest time that the end of the server waits for the collector.
_CLOSE_S = 3.0
_EXPORTED, _FAILED = "headrace_otel_metric_messages_sent_total", "headrace_otel_metric_messages_failed_total"
_SENT, _DROPPED = "headrace_otel_records_sent_total", "headrace_otel_records_dropped_total"


class OtelExtension(Extension):
    name: ClassVar[str] = "otel"
    metrics = (
        PublishedMetric(_EXPORTED, "Messages with metrics that a collector has taken.", "counter"),
        PublishedMetric(_FAILED, "Messages with metrics that no collector has taken.", "counter"),
        PublishedMetric(_SENT, "Log lines and access records that a collector has taken.", "counter"),
        PublishedMetric(_DROPPED, "Log lines and access records that were dropped.", "counter"),
    )

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        options = self._options = engine.options.group(OtelOptions)
        self._metrics: MetricSender | None = None
        self._records: RecordSender | None = None
        if not options.is_on:
            return
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

        from headrace_otel.collectors import connect
        from headrace_otel.delivery import Delivery
        from headrace_otel.log_lines import LogLines
        from headrace_otel.metric_messages import MetricMessages
        from headrace_otel.metric_sender import MetricSender
        from headrace_otel.record_sender import RecordSender

        resource = _resource(options.attributes, bool(engine.options.workers))
        if options.metrics:
            answer = ExportMetricsServiceResponse
            self._exports = Delivery(connect(options.target), "metrics", answer, "rejected_data_points")
            messages = MetricMessages(resource, time_ns(), options.histograms == "exponential")
            # `collect` is read with each export, because frontends that start later add to it.
            self._metrics = MetricSender(
                lambda: engine.collect(), self._devices, messages, self._exports, options.interval_ms / 1000
            )
        if options.logs or options.access:
            records = Delivery(connect(options.target), "logs", ExportLogsServiceResponse, "rejected_log_records")
            self._records = RecordSender(options.queue, records, resource)
        if options.logs and engine.log is not None:
            engine.log.follow(LogLines(options.queue).add)
        elif options.logs:
            log.warning("--otel-logs sends nothing: another program has configured the log")

    @property
    def enabled(self) -> bool:
        return self._options.is_on

    def measure(self) -> Mapping[str, float]:
        metrics, records = self._metrics, self._records
        return {
            _EXPORTED: 0 if metrics is None else self._exports.sent,
            _FAILED: 0 if metrics is None else self._exports.failed,
            _SENT: 0 if records is None else records.sent,
            _DROPPED: 0 if records is None else records.dropped,
        }

    def close(self) -> None:
        """Send what is left, for at most `_CLOSE_S` in all."""
        ends_at = monotonic() + _CLOSE_S
        senders = [each for each in (self._metrics, self._records) if each is not None]
        for sender in senders:
            sender.end()
        for sender in senders:
            sender.join(max(ends_at - monotonic(), 0.0))

    def _devices(self) -> Callable[[], Iterable[Metric]]:
        """Return a function that reads the machine. Blocks: this loads the driver of GPUs."""
        return machine_metrics(self.engine.options)


def _resource(attributes: Mapping[str, str], has_workers: bool) -> Resource:
    """Return the resource of this process. The instance tells workers and restarted servers apart."""
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    from headrace_otel.log_messages import attribute

    attributes = {
        "service.instance.id": str(uuid.uuid4()), "host.name": socket.gethostname(), **attributes
    }  # fmt: skip
    if has_workers and "service.instance.id" in attributes:
        attributes["service.instance.id"] += f".{os.getpid()}"
    values = [attribute(name, value) for name, value in attributes.items()]
    return Resource(attributes=[*values, attribute("process.pid", os.getpid())])
