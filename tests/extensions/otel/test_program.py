"""Metrics and records of real servers, compared with their metrics page at the same time."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from headrace import ConfigError
from headrace.config.option_groups import read_groups
from headrace_otel import OtelOptions
from tests.extensions.otel.collector import Collector, collecting, series, values

if TYPE_CHECKING:
    from tests.conftest import Headrace

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
#: Read at different times by the page and by the export.
MOVES = ("nv_cpu_", "headrace_memory_", "headrace_otel_", "headrace_trace", "nv_energy", "nv_gpu")


def page_series(server: Headrace) -> dict[Any, Any]:
    """Return the series of the page in the collector's form: count and sum of a histogram."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics", timeout=20) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    found: dict[Any, Any] = {}
    for family in families:
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            if family.type == "histogram":
                if sample.name.endswith(("_count", "_sum")):
                    place = found.setdefault((family.name, labels), [0, 0])
                    place[sample.name.endswith("_sum")] = sample.value
            else:  # this parser puts `_total` behind the samples of a counter
                is_theirs = sample.name.startswith("nv_") and sample.name.endswith("_total")
                name = sample.name.removesuffix("_total") if is_theirs else sample.name
                found[name.replace("headrace_log_lines_lost_total", "headrace_log_lines_lost"), labels] = sample.value
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in found.items()
        if not key[0].startswith(MOVES)
    }


def ask(server: Headrace, count: int, headers: dict[str, str] | None = None) -> None:
    x = tritonclient.http.InferInput("x", [2, 1], "FP32").set_data_from_numpy(np.ones((2, 1), np.float32))
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        for _ in range(count):
            client.infer("one", [x], request_id="7", headers=headers)


@pytest.fixture(scope="module", params=["http/protobuf", "grpc"])
def served(
    request: pytest.FixtureRequest, keep_serving: Callable[..., Headrace], models: Path, collector: Collector
) -> tuple[Headrace, Collector]:
    endpoint = collector.grpc if request.param == "grpc" else collector.http
    collector.metrics.clear()
    collector.logs.clear()
    words = ["--otel-histograms=exponential"] if request.param == "grpc" else []
    server = keep_serving(
        f"--model-repository={models}", "--otel-metrics=true", "--otel-logs=true", "--otel-access=true",
        f"--otel-endpoint={endpoint}", f"--otel-protocol={request.param}", "--otel-interval-ms=200",
        "--otel-resource=deployment.environment=test%2C1,service.name=mine", *words,
    )  # fmt: skip
    return server, collector


def test_every_series_of_the_page_arrives_with_its_value(served: tuple[Headrace, Collector]) -> None:
    server, collector = served
    ask(server, 5)
    wanted = page_series(server)
    assert wanted["nv_inference_count", frozenset({("model", "one"), ("version", "1"), ("_team", "blue")})] >= 10
    assert len({name for name, _ in wanted}) >= 20

    def is_there() -> bool:
        found = series(collector.metrics[-3:])
        return all(found.get(key) == value for key, value in wanted.items())

    collector.wait_for(is_there)
    found = series(collector.metrics)
    assert {name for name, _ in found} >= {"nv_cpu_utilization", "nv_pinned_memory_pool_total_bytes"}
    # The server of the other parameter may send at the same time.
    sent = [values(message.resource_metrics[0].resource.attributes) for message in tuple(collector.metrics)]
    attributes = [each for each in sent if each["process.pid"] == server.process.pid][-1]
    assert attributes["service.name"] == "mine"
    assert attributes["deployment.environment"] == "test,1"


def test_histograms_have_the_buckets_of_the_page(served: tuple[Headrace, Collector]) -> None:
    server, collector = served
    ask(server, 1)
    counts: dict[float, float] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics", timeout=20) as reply:
        for family in text_string_to_metric_families(reply.read().decode()):
            if family.name == "nv_inference_request_histogram_us":
                counts = {float(s.labels["le"]): s.value for s in family.samples if s.labels.get("le") and
                          s.labels["model"] == "one"}  # fmt: skip

    def used() -> dict[float, float]:
        """Return the counts of the buckets that have some, by their upper bounds."""
        found: dict[float, float] = {}
        for message in tuple(collector.metrics[-3:]):
            for metric in message.resource_metrics[0].scope_metrics[0].metrics:
                if metric.name != "nv_inference_request_histogram_us":
                    continue
                for point in metric.histogram.data_points:
                    if values(point.attributes)["model"] == "one":
                        bounds = [*point.explicit_bounds, float("inf")]
                        found = dict(zip(bounds, point.bucket_counts, strict=True))
                for exponential in metric.exponential_histogram.data_points:
                    if values(exponential.attributes)["model"] == "one":
                        assert exponential.scale == 0
                        first = exponential.positive.offset + 1
                        found = {2.0 ** (first + n): c for n, c in enumerate(exponential.positive.bucket_counts)}
        return {bound: count for bound, count in found.items() if count}

    bounds = sorted(counts)
    wanted = {
        bound: counts[bound] - below
        for bound, below in zip(bounds, [0, *[counts[each] for each in bounds]], strict=False)
        if counts[bound] > below
    }
    assert wanted
    collector.wait_for(lambda: used() == wanted)


def test_an_operation_has_a_record_with_its_trace(served: tuple[Headrace, Collector]) -> None:
    server, collector = served
    ask(server, 1, {"traceparent": f"00-{TRACE}-{SPAN}-01"})
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.get_server_metadata()
        with pytest.raises(InferenceServerException):
            client.get_model_metadata("none")

    def read() -> dict[str, Any] | None:
        found = {(v["headrace.operation"], v["headrace.status"], bool(r.trace_id)): (r, v) for r in
                 collector.records("headrace.access") for v in [values(r.attributes)]}  # fmt: skip
        wanted = ("infer", "ok", True), ("server_metadata", "ok", False), ("model_metadata", "Not found", False)
        return {key[0]: found[key] for key in wanted} if all(key in found for key in wanted) else None

    found = collector.wait_for(read)
    record, attributes = found["infer"]
    assert (record.trace_id.hex(), record.span_id.hex(), record.flags) == (TRACE, SPAN, 1)
    assert (record.severity_text, record.body.string_value) == ("INFO", "http infer one ok")
    assert attributes["headrace.request_id"] == "7"
    assert attributes["headrace.request_bytes"] == attributes["headrace.response_bytes"] == 8
    assert 0 <= attributes["headrace.compute_us"] <= attributes["headrace.duration_us"]
    assert found["model_metadata"][0].severity_text == "WARNING"


def test_lines_of_the_log_arrive_with_severity_and_place(served: tuple[Headrace, Collector]) -> None:
    _, collector = served

    def read() -> Any:
        return next((r for r in collector.records() if "successfully loaded 'one'" in r.body.string_value), None)

    record = collector.wait_for(read)
    assert (record.severity_number, record.severity_text) == (9, "INFO")
    attributes = values(record.attributes)
    assert attributes["code.file.path"].endswith(".py")
    assert attributes["code.line.number"] > 0


def test_workers_have_distinct_instance_ids(serve: Callable[..., Headrace], models: Path) -> None:
    """Their series are distinct: the sum over the instances equals the page."""
    with collecting() as collector:
        server = serve(
            f"--model-repository={models}", "--workers=2", "--otel-metrics=true", f"--otel-endpoint={collector.http}",
            "--otel-interval-ms=200",
        )  # fmt: skip
        for _ in range(4):
            ask(server, 1)
        collector.wait_for(lambda: len(collector.instances()) == 2)

        def total() -> float:
            by_instance: dict[str, list[Any]] = {}
            for message in tuple(collector.metrics):
                resource = values(message.resource_metrics[0].resource.attributes)
                by_instance.setdefault(resource["service.instance.id"], []).append(message)
            labels = frozenset({("model", "one"), ("version", "1"), ("_team", "blue")})
            key = "nv_inference_request_success", labels
            return float(sum(series(each).get(key, 0) for each in by_instance.values()))

        collector.wait_for(lambda: total() == 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--otel-metrics=true", "--otel-endpoint=localhost:4318"], "expected http://<host>:<port>"),
        (["--otel-metrics=true", "--otel-endpoint=http://h:99999"], "Port out of range"),
        (["--otel-metrics=true", "--otel-endpoint=http://h:0"], "expected http://<host>:<port>"),
        (["--otel-logs=true", "--otel-endpoint=http://me:secret@h"], "OTEL_EXPORTER_OTLP_HEADERS"),
        (["--otel-metrics=true", "--otel-interval-ms=0"], "--otel-interval-ms is 0, expected 100 to 86400000"),
        (["--otel-metrics=true", "--otel-protocol=http/json"], "expected <http/protobuf|grpc>"),
        (["--otel-metrics=true", "--otel-resource=a"], "--otel-resource: 'a' is not <key>=<value>"),
        (["--otel-endpoint=http://h"], "need --otel-metrics, --otel-logs or --otel-access"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_expected_values(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_groups([OtelOptions], words)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)
