"""Messages of OTLP for families, and when they are sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from prometheus_client import Metric
from prometheus_client.samples import Sample

from headrace_otel.metric_messages import MetricMessages
from headrace_otel.metric_sender import MetricSender
from tests.extensions.otel.collector import series


def counter(*values: float) -> Metric:
    family = Metric("nv_count", "Help", "counter")
    family.samples += [Sample("nv_count", {"model": f"m{number}"}, value) for number, value in enumerate(values)]
    return family


def read(messages: Sequence[bytes]) -> list[ExportMetricsServiceRequest]:
    return [ExportMetricsServiceRequest.FromString(each) for each in messages]


def starts(message: ExportMetricsServiceRequest) -> list[int]:
    [metric] = message.resource_metrics[0].scope_metrics[0].metrics
    assert metric.sum.is_monotonic
    assert metric.sum.aggregation_temporality == 2, "cumulative"
    return [point.start_time_unix_nano for point in metric.sum.data_points]


def test_a_reset_counter_has_a_new_start_time() -> None:
    """A reloaded model counts from zero. A later loaded model starts between two exports."""
    messages = MetricMessages(Resource(), 100, is_exponential=False)
    start_times = [starts(read(list(messages.write([counter(*values)], now)))[0])
            for now, values in ((200, [5]), (300, [6, 0]), (400, [2, 1]), (500, [2, 1]))]  # fmt: skip
    assert start_times == [[100], [100, 200], [300, 200], [300, 200]]


def test_many_series_are_split_into_messages_that_collectors_take() -> None:
    family = Metric("h", "", "histogram")
    for number in range(2500):
        labels = {"model": f"m{number}" * 4, "version": "1"}
        family.samples += [Sample("h_count", labels, 28), Sample("h_sum", labels, 9)]
        family.samples += [Sample("h_bucket", {**labels, "le": str(1 << power)}, power + 1) for power in range(27)]
        family.samples.append(Sample("h_bucket", {**labels, "le": "+Inf"}, 28))
    written = list(MetricMessages(Resource(), 1, is_exponential=False).write([counter(*range(9000)), family], 2))
    assert max(map(len, written)) < 2 << 20
    found = series(read(written))
    assert len(found) == 11_500
    assert found["nv_count", frozenset({("model", "m8999")})] == 8999
    assert found["h", frozenset({("model", "m7m7m7m7"), ("version", "1")})] == (28, 9)


def test_summaries_gauges_and_unknown_families() -> None:
    gauge, unknown, summary = Metric("g_bytes", "", "gauge"), Metric("u", "", "unknown"), Metric("s_us", "", "summary")
    gauge.samples.append(Sample("g_bytes", {}, 7))
    unknown.samples.append(Sample("u", {}, float("nan")))
    summary.samples += [
        Sample("s_us_count", {}, 2),
        Sample("s_us_sum", {}, 5.5),
        Sample("s_us", {"quantile": "0.5"}, 3),
    ]
    [message] = read(list(MetricMessages(Resource(), 1, False).write([gauge, unknown, summary], 2)))
    of_gauge, of_unknown, of_summary = message.resource_metrics[0].scope_metrics[0].metrics
    assert (of_gauge.unit, of_gauge.gauge.data_points[0].as_int) == ("By", 7)
    assert of_unknown.gauge.data_points[0].as_double != of_unknown.gauge.data_points[0].as_double
    point = of_summary.summary.data_points[0]
    assert (of_summary.unit, point.count, point.sum) == ("us", 2, 5.5)
    assert [(each.quantile, each.value) for each in point.quantile_values] == [(0.5, 3)]


class Hanging:
    """A delivery that is blocked until the test releases it."""

    def __init__(self) -> None:
        self.may_go, self.has_begun = threading.Event(), threading.Event()
        self.not_before = 0.0
        self.messages: list[bytes] = []

    def send(self, message: bytes) -> bool:
        self.has_begun.set()
        self.may_go.wait(20)
        self.messages.append(message)
        return True

    def close(self) -> None:
        self.may_go.set()


def test_while_one_export_hangs_no_other_starts() -> None:
    """The last export has the final values: values in between were not stored."""
    delivery, reads = Hanging(), 0

    def read_metrics() -> list[Metric]:
        nonlocal reads
        reads += 1
        return [counter(reads)]

    async def test() -> None:
        messages = MetricMessages(Resource(), 1, is_exponential=False)
        sender = MetricSender(read_metrics, lambda: list, messages, delivery, 0.01)  # type: ignore[arg-type]
        while sender.skipped < 5:
            await asyncio.sleep(0.01)
        assert reads == 1
        delivery.may_go.set()
        while len(delivery.messages) < 2:
            await asyncio.sleep(0.01)
        sender.end()
        sender.join(20)
        assert len(delivery.messages) == reads

    asyncio.run(asyncio.wait_for(test(), 20))
