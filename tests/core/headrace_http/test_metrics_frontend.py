"""A real server with the identity backend; prometheus-client's parser reads its page."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace.config.options import ServerOptions
from headrace.errors import Unavailable
from headrace.server import Server
from headrace.telemetry.statistics import ModelStatistics
from headrace_http.metrics_frontend import MetricsFrontend

CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] }
"""
ROWS = {"INPUT0": np.zeros((3, 2), np.float32)}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "plain" / "1").mkdir(parents=True)
    (tmp_path / "plain" / "config.pbtxt").write_text(CONFIG)
    return tmp_path


@asynccontextmanager
async def started(repository: Path, **options: Any) -> AsyncIterator[tuple[Server, MetricsFrontend, httpx.AsyncClient]]:
    options = {"metrics_address": "127.0.0.1", "metrics_port": 0, "exit_timeout_secs": 5, **options}
    async with Server(ServerOptions(model_repository=(str(repository),), **options)) as server:
        frontend = MetricsFrontend(server.engine)
        await frontend.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.port}", timeout=10) as client:
                yield server, frontend, client
        finally:
            await frontend.stop()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def samples(page: str) -> dict[str, float]:
    """By name and labels, as printed; the parser's own ``_total`` taken away again."""
    found = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {f"{s.name.removesuffix('_total')} {sorted(s.labels.values())}": s.value for s in found}


def test_page_follows_the_requests_that_a_model_answers(repository: Path) -> None:
    async def test() -> None:
        async with started(repository) as (server, _, client):
            before = samples((await client.get("/metrics")).text)
            for _ in range(4):
                await server.infer_async("plain", ROWS)
            after = samples((await client.get("/metrics")).text)
        assert before["nv_inference_request_success ['1', 'plain']"] == 0
        assert after["nv_inference_request_success ['1', 'plain']"] == 4
        assert after["nv_inference_count ['1', 'plain']"] == 12
        assert after["nv_inference_batch_size_histogram_sum ['1', 'plain']"] == 12
        assert after["nv_inference_request_histogram_us_count ['1', 'plain']"] == 4
        assert after["nv_inference_pending_request_count ['1', 'plain']"] == 0
        assert after["nv_model_load_duration_secs ['1', 'plain']"] > 0

    run(test)


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metrics?name[]=x"])
def test_page_is_plain_text(repository: Path, path: str) -> None:
    async def test() -> None:
        async with started(repository) as (_, _, client):
            answer = await client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert answer.text.startswith("# HELP nv_inference_request_success ")

    run(test)


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("gzip;q=0.5, identity;q=0.1", "gzip"),
        ("deflate, gzip, br", "deflate"),
        ("", None),
        ("identity", None),
        ("gzip;q=0", None),
        ("br", None),
    ],
)
def test_page_is_compressed_for_clients_that_ask_for_it(repository: Path, accepted: str, encoding: str | None) -> None:
    async def test() -> None:
        async with started(repository) as (_, _, client):
            answer = await client.get("/metrics", headers={"Accept-Encoding": accepted})
        assert answer.headers.get("content-encoding") == encoding
        assert answer.headers["vary"] == "Accept-Encoding"
        assert samples(answer.text)["nv_inference_count ['1', 'plain']"] == 0  # httpx has unpacked it
        if encoding:
            assert int(answer.headers["content-length"]) < len(answer.text) / 4

    run(test)


def test_page_is_printed_off_the_event_loop(repository: Path) -> None:
    printed_on: list[threading.Thread] = []

    async def test() -> None:
        async with started(repository) as (server, _, client):
            collect = server.engine.collect

            def measured() -> Iterator[Metric]:
                for family in families:
                    printed_on.append(threading.current_thread())
                    yield family

            families = collect()
            server.engine.collect = measured
            assert (await client.get("/metrics")).status_code == 200

    run(test)
    assert len(printed_on) > 10
    assert threading.current_thread() not in printed_on


def test_other_paths_are_an_empty_success(repository: Path) -> None:
    async def test() -> None:
        async with started(repository) as (_, _, client):
            answers = [await client.get(path) for path in ("/", "/metric", "/v2/health/live")]
        assert [(answer.status_code, answer.content) for answer in answers] == [(200, b"")] * 3

    run(test)


def test_other_methods_are_refused(repository: Path) -> None:
    async def test() -> None:
        async with started(repository) as (_, _, client):
            answers = [await client.request(method, "/metrics") for method in ("POST", "PUT", "DELETE", "HEAD")]
        assert [answer.status_code for answer in answers] == [405] * 4
        assert answers[0].json() == {"error": "Method Not Allowed"}

    run(test)


@pytest.mark.parametrize("headers", [{}, {"Inference-Header-Content-Length": "1"}])
def test_bodies_are_not_kept(repository: Path, headers: dict[str, str]) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(65536)

    async def test() -> None:
        async with started(repository) as (_, _, client):
            answer = await client.post("/v2/models/plain/infer", content=chunks(), headers=headers)
            assert answer.status_code == 400
            assert "exceed" in answer.text
            assert (await client.get("/metrics")).status_code == 200

    run(test)


def test_summaries_are_counted_from_the_first_request_when_asked_for(repository: Path) -> None:
    async def test() -> None:
        config = {"summary_latencies": "true", "summary_quantiles": "0.25:0.05", "counter_latencies": "false"}
        async with started(repository, metrics_config=config) as (server, _, client):
            await server.infer_async("plain", ROWS)
            found = samples((await client.get("/metrics")).text)
        assert found["nv_inference_request_summary_us_count ['1', 'plain']"] == 1
        assert found["nv_inference_request_summary_us ['0.25', '1', 'plain']"] > 0
        assert "nv_inference_request_duration_us ['1', 'plain']" not in found

    run(test)


PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"


def test_native_histograms_are_for_clients_that_take_protobuf(repository: Path) -> None:
    async def test() -> None:
        config = {"native_histograms": "true"}
        async with started(repository, metrics_config=config) as (_, _, client):
            text = await client.get("/metrics")
            page = await client.get("/metrics", headers={"Accept": f"{PROTOBUF},text/plain;q=0.5"})
        assert text.headers["content-type"] == "text/plain; charset=utf-8"
        assert page.headers["content-type"].startswith("application/vnd.google.protobuf; ")
        assert {text.headers["vary"], page.headers["vary"]} == {"Accept, Accept-Encoding"}
        assert b"nv_cpu_utilization" in page.content

    run(test)


def test_without_the_setting_the_page_is_text_also_for_them(repository: Path) -> None:
    async def test() -> None:
        async with started(repository) as (_, _, client):
            answer = await client.get("/metrics", headers={"Accept": PROTOBUF})
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"

    run(test)


def test_patterns_choose_among_all_families_of_the_page(repository: Path) -> None:
    async def test() -> None:
        config = {
            "include": "nv_cpu_*,nv_inference_*,headrace_log_*",
            "exclude": "*_histogram*,nv_cpu_memory*,*_duration_us",
        }
        async with started(repository, metrics_config=config) as (_, _, client):
            page = (await client.get("/metrics")).text
        assert [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")] == [
            "nv_inference_request_success",
            "nv_inference_count",
            "nv_inference_exec_count",
            "nv_inference_pending_request_count",
            "nv_inference_request_failure",
            "headrace_log_lines_lost",
            "nv_cpu_utilization",
        ]

    run(test)


def test_host_metrics_can_be_turned_off(repository: Path) -> None:
    async def test() -> None:
        async with started(repository, allow_cpu_metrics=False, pinned_memory_pool_byte_size=7) as (_, _, client):
            page = (await client.get("/metrics")).text
        assert "nv_cpu_" not in page
        assert "nv_pinned_memory_pool_total_bytes 7\n" in page

    run(test)


def test_start_is_logged_with_address_and_port(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def test() -> None:
        async with started(repository) as (_, frontend, _):
            assert f"Started Metrics Service at 127.0.0.1:{frontend.port}" in caplog.messages

    run(test)


def test_port_in_use_is_named(repository: Path) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
                async with started(repository, metrics_port=port):
                    pass

    run(test)


def test_metrics_that_cannot_be_read_are_an_error_and_not_a_silence(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with started(repository) as (_, _, client):
            with monkeypatch.context() as broken:
                broken.setattr(ModelStatistics, "snapshot", lambda self, pending: 1 / 0)
                assert (await client.get("/metrics")).status_code == 500
            assert (await client.get("/metrics")).status_code == 200

    run(test)


def test_the_page_has_the_metrics_of_models_and_the_restarts_of_instances(repository: Path) -> None:
    async def test() -> None:
        async with started(repository) as (server, _, client):
            metrics = server.custom_metrics
            metrics.metric(metrics.family("words_total", "read", "counter"), {"lang": "en"}, None).update(
                "increment", 3
            )
            server.resolve("plain").executors[0].restarts = 2  # type: ignore[misc]  # as a process that died twice says
            found = samples((await client.get("/metrics")).text)
            assert found["words ['en']"] == 3
            assert found["nv_model_instance_restart_count ['1', 'plain']"] == 2

    run(test)


def test_a_scraper_that_keeps_its_connection_does_not_delay_the_stop(repository: Path) -> None:
    async def test() -> None:
        async with started(repository, exit_timeout_secs=30) as (_, frontend, client):
            assert (await client.get("/metrics")).status_code == 200
            await asyncio.wait_for(frontend.stop(), 2)

    run(test)
