"""OpenTelemetry: the spans of a collector, compared with a real Triton's. And misbehaving collectors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from tritonclient import grpc as grpc_client

from tests.extensions.trace.collector import Collector, ReceivedSpan, collecting, read
from tests.extensions.trace.recorded import ask, counters, infer_adds, infer_all

if TYPE_CHECKING:
    from tests.conftest import Headrace

TRITONS = json.loads(Path(__file__).with_name("spans.json").read_text())
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
#: The spans that Triton does not have.
OURS = ("queue", "batch", "cache")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture
def start_for(serve: Callable[..., Headrace], models: Path) -> Callable[..., Headrace]:
    """Start a server that sends spans to an address."""

    def run(url: str, *settings: str, models: Path = models) -> Headrace:
        sent = ("mode=opentelemetry", f"opentelemetry,url={url}", "opentelemetry,bsp_schedule_delay=50")
        words = [f"--trace-config={setting}" for setting in (*sent, "level=TIMESTAMPS", *settings)]
        return serve(f"--model-repository={models}", *words)

    return run


def post(server: Headrace, model: str = "adds", **headers: str) -> None:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    url = f"http://127.0.0.1:{server.http}/v2/models/{model}/infer"
    assert httpx.post(url, json={"inputs": [tensor]}, headers=headers).status_code == 200


def summary(spans: Sequence[ReceivedSpan]) -> list[Any]:
    """Return spans without ids and times: name, parent, attributes, events."""
    names = {span.id: span.name for span in spans}
    found = []
    for span in spans:
        attributes = {key: value for key, value in span.attributes.items() if not key.startswith("triton.trace_")}
        found.append([span.name, names.get(span.parent_id), attributes, sorted(span.events)])
    return sorted(found, key=repr)


def test_a_collector_gets_the_spans_that_triton_sends(
    collector: Collector, start_for: Callable[..., Headrace], all_models: Path
) -> None:
    server = start_for(collector.url, "rate=1", "opentelemetry,resource=where=here", models=all_models)
    infer_all(server.http, server.grpc)
    server.stop()
    spans = collector.spans
    assert summary([span for span in spans if span.name not in OURS]) == TRITONS
    assert all(span.begin_ns <= span.end_ns for span in spans)
    assert abs(spans[0].begin_ns - time.time_ns()) < 600e9
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.resource["service.name"] == "triton-inference-server"
        assert span.resource["where"] == "here"
        outer = by_id.get(span.parent_id)
        if outer is not None:
            assert outer.trace_id == span.trace_id
            assert outer.begin_ns <= span.begin_ns
    failed = {span.attributes.get("triton.model_name") for span in spans if span.status == 2}
    assert failed == {"fails", None}, "the spans of a request that failed say so"
    queued = [by_id[span.parent_id].name for span in spans if span.name == "queue"]
    executed = [span.name for span in spans if "REQUEST_START" in span.events and span.name != "twice"]
    assert sorted(queued) == sorted(executed)


def test_spans_are_sent_over_grpc_too(start_for: Callable[..., Headrace]) -> None:
    found: list[ReceivedSpan] = []
    arrived = threading.Event()

    def export(request: Any, context: Any) -> Any:
        found.extend(read(request))
        arrived.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(
        export,
        trace_service_pb2.ExportTraceServiceRequest.FromString,
        trace_service_pb2.ExportTraceServiceResponse.SerializeToString,
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        post(start_for(f"http://127.0.0.1:{port}", "rate=1", "opentelemetry,protocol=grpc"))
        assert arrived.wait(60)
        assert {span.name for span in found} == {"InferRequest", "adds", "queue", "compute"}
    finally:
        server.stop(0)


def test_a_request_with_a_trace_context_is_traced_as_a_part_of_it(
    collector: Collector, start_for: Callable[..., Headrace]
) -> None:
    server = start_for(collector.url, "rate=1000")
    post(server)
    for flags in ("01", "00"):
        post(server, traceparent=f"00-{TRACE}-{PARENT}-{flags}", tracestate="a=b")
    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        x = grpc_client.InferInput("x", [1, 2], "FP32")
        x.set_data_from_numpy(np.ones((1, 2), np.float32))
        client.infer("adds", [x], headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    roots = [span for span in collector.wait_for(12) if span.name == "InferRequest"]
    assert [(root.trace_id, root.parent_id) for root in roots] == [(TRACE, PARENT)] * 3
    assert ask(server.http, "/v2/trace/setting", {"trace_level": ["OFF"]})[0] == 200
    post(server, traceparent=f"00-{TRACE}-{PARENT}-01")
    server.stop()
    assert len(collector.spans) == 12


HOSTILE = [
    "", "garbage", "00", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-more",
    f"00-{TRACE}-{PARENT}-zz", f"00-{TRACE[:-1]}-{PARENT}-01", "00-" + "a" * 30_000,
    f"01-{TRACE}-{PARENT}-01-{'x' * 600}", "\u00e9".encode().decode("latin-1"),
]  # fmt: skip


def test_a_trace_context_of_hostile_form_is_ignored(collector: Collector, start_for: Callable[..., Headrace]) -> None:
    server = start_for(collector.url, "rate=1000")
    body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}") as client:
        for text in HOSTILE:
            headers = {b"traceparent": text.encode("latin-1"), b"tracestate": b"=,;" * 100}
            assert client.post("/v2/models/adds/infer", json=body, headers=headers).status_code == 200
    assert ask(server.http, "/v2/trace/setting", {"trace_rate": "1"})[0] == 200
    post(server, traceparent="garbage", tracestate="=,;")
    server.stop()
    (root,) = [span for span in collector.spans if span.name == "InferRequest"]
    assert not root.parent_id


def test_a_batch_has_links_to_its_requests(collector: Collector, serve: Callable[..., Headrace], models: Path) -> None:
    config = models / "adds/config.pbtxt"
    delay = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 5000000 }"
    config.write_text(config.read_text().replace("dynamic_batching { }", delay))
    sent = ("mode=opentelemetry", f"opentelemetry,url={collector.url}", "level=TIMESTAMPS", "rate=1")
    server = serve(f"--model-repository={models}", *(f"--trace-config={each}" for each in sent))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: post(server), range(4)))
    server.stop()
    (batch,) = [span for span in collector.spans if span.name == "batch"]
    assert sorted(batch.links) == sorted(span.id for span in collector.spans if span.name == "adds")
    assert batch.attributes == {"headrace.batch.requests": "4"}


def test_a_response_from_the_cache_has_a_span_of_its_own(
    collector: Collector, serve: Callable[..., Headrace], models: Path
) -> None:
    config = models / "adds/config.pbtxt"
    config.write_text(config.read_text() + "response_cache { enable: true }\n")
    sent = ("mode=opentelemetry", f"opentelemetry,url={collector.url}", "level=TIMESTAMPS", "rate=1")
    words = [f"--trace-config={each}" for each in sent]
    server = serve(f"--model-repository={models}", "--cache-config=local,size=1048576", *words)
    for _ in range(2):
        post(server)
    server.stop()
    roots = sorted((each for each in collector.spans if each.name == "InferRequest"), key=lambda root: root.begin_ns)
    names = [sorted(span.name for span in collector.spans if span.trace_id == root.trace_id) for root in roots]
    assert names == [["InferRequest", "adds", "compute", "queue"], ["InferRequest", "adds", "cache"]]


def test_a_silent_collector_delays_no_request_and_dropped_records_are_counted(
    collector: Collector, start_for: Callable[..., Headrace]
) -> None:
    collector.gate.clear()
    server = start_for(collector.url, "rate=1", "opentelemetry,bsp_max_queue_size=4")
    body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}") as client:
        for _ in range(600):
            assert client.post("/v2/models/adds/infer", json=body).status_code == 200
    server.wait_for_line("traces for the collector are dropped: the queue is full")
    found = counters(server)
    assert found["headrace_trace_dropped_total"] >= 600 - 4 - 512
    assert found["headrace_trace_written_total"] == 0
    assert server.log.count("are dropped") < 30
    collector.gate.set()


@pytest.mark.parametrize("kind", ["gone", "error", "elsewhere", "rubbish", "huge"])
def test_a_collector_that_refuses_spans_fails_no_request(
    collector: Collector, start_for: Callable[..., Headrace], kind: str
) -> None:
    collector.status = {"error": 400, "elsewhere": 302}.get(kind, 200)
    collector.body = b"\xff" * {"rubbish": 1000, "huge": 70_000}.get(kind, 0)
    url = "http://127.0.0.1:1/v1/traces" if kind == "gone" else collector.url
    server = start_for(url, "rate=1")
    infer_adds(server.http)
    if kind == "rubbish":  # the status means that it accepted them
        assert collector.wait_for(1)
    else:
        server.wait_for_line("traces for the collector are dropped")
        found = counters(server)
        assert found["headrace_trace_dropped_total"] > 0 == found["headrace_trace_written_total"]
    server.stop()


def test_the_settings_are_those_of_triton(start_for: Callable[..., Headrace]) -> None:
    server = start_for("http://127.0.0.1:1/v1/traces", "opentelemetry,resource=a=b")
    assert ask(server.http, "/v2/trace/setting", None) == (200, {
        "trace_level": ["TIMESTAMPS"], "trace_rate": "1000", "trace_count": "-1", "trace_mode": "opentelemetry",
        "url": "http://127.0.0.1:1/v1/traces", "resource": "a=b", "bsp_schedule_delay": "50",
        "bsp_max_export_batch_size": "512", "bsp_max_queue_size": "2048",
    })  # fmt: skip
