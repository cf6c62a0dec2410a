"""The response cache in a server: configs, ``--cache-config``, and the server's answers about it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import CachedResponse, ResponseCache, Server, builtins, hookimpl
from headrace.errors import ConfigError, LoadError, PluginError
from headrace.models.view import statistics_document
from headrace_http import text_format
from tests.core.conftest import GATED, Gated, WriteModel

LOCAL = {"local": {"size": "1000000"}}
CACHED = f"{GATED} response_cache {{ enable: true }}"
X = np.ones((1, 2), np.float32)


def page(server: Server) -> str:
    return text_format.text(server.engine.collect())


def counted(server: Server, model: str) -> dict[str, int]:
    """The families of the cache, as far as ``model`` has series."""
    counters = re.findall(rf'^(nv_cache_\w+){{model="{model}",version="1"}} (\d+)$', page(server), re.MULTILINE)
    return {name: int(value) for name, value in counters if "duration" not in name}


def test_a_model_that_takes_part_is_asked_once_and_another_each_time(
    make_server: Callable[..., Server], write_model: WriteModel, gated: type[Gated]
) -> None:
    write_model("cached", CACHED)
    write_model("plain", GATED)
    with make_server(cache_config=LOCAL) as server:
        for model in ("cached", "plain"):
            for _ in range(3):
                np.testing.assert_array_equal(server.infer(model, {"x": X}).outputs["y"], X)
        assert [type(each.model_queue).__name__ for each in server.served()] == ["CachingModelQueue", "ModelQueue"]
        statistics = {
            model.name: statistics_document(model.name, model.version, model.snapshot()) for model in server.served()
        }
        assert statistics["cached"]["execution_count"] == statistics["cached"]["inference_count"] == 1
        stats = statistics["cached"]["inference_stats"]
        counts = {name: stats[name]["count"] for name in stats}
        assert counts == {
            "success": 3, "fail": 0, "queue": 3, "compute_input": 1, "compute_infer": 1, "compute_output": 1,
            "cache_hit": 2, "cache_miss": 1,
        }  # fmt: skip
        assert 0 < stats["cache_hit"]["ns"] < stats["success"]["ns"]
        assert statistics["plain"]["inference_stats"]["cache_miss"] == {"count": 0, "ns": 0}
        assert counted(server, "cached") == {
            "nv_cache_num_hits_per_model": 2,
            "nv_cache_num_misses_per_model": 1,
            "nv_cache_num_failures_per_model": 0,
        }
        assert counted(server, "plain") == {}
        assert "headrace_local_cache_entries 1\n" in page(server)
        assert 'nv_inference_request_success{model="cached",version="1"} 3' in page(server)
        assert 'nv_inference_count{model="cached",version="1"} 1' in page(server)


@pytest.mark.parametrize("size", [1000, 100])  # the tensors are too large; and an entry with its overhead
def test_a_response_too_large_for_any_cache_is_reported_in_tritons_words(
    make_server: Callable[..., Server], write_model: WriteModel, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    write_model("cached", CACHED)
    with make_server(cache_config={"local": {"size": str(size)}}) as server:
        server.infer("cached", {"x": np.ones((1, 2 if size == 100 else 252), np.float32)})
        assert counted(server, "cached")["nv_cache_num_failures_per_model"] == 0
    (line,) = (text for text in caplog.messages if text.startswith("Failed to insert"))
    assert re.fullmatch(
        r"Failed to insert key \[\d+\] into response cache: Requested byte_size: (\d+) is greater than total cache "
        f"size: {size}",
        line,
    )


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "Adding default backend config setting: default-max-batch-size,4"),
        ({"": {"default-max-batch-size": "5"}}, "Found overwritten default setting: default-max-batch-size,5"),
    ],
)
def test_a_load_logs_the_default_batch_size(
    make_server: Callable[..., Server],
    write_model: WriteModel,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, dict[str, str]],
    line: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    write_model("plain", GATED)
    with make_server(backend_config=settings):
        assert [text for text in caplog.messages if "default-max-batch-size" in text] == [line]


def test_a_model_that_would_take_part_does_without_a_cache(
    make_server: Callable[..., Server], write_model: WriteModel
) -> None:
    write_model("cached", CACHED)
    with make_server() as server:
        for _ in range(2):
            server.infer("cached", {"x": X})
        (model,) = server.served()
        assert model.snapshot().executions.execution_count == 2
        assert counted(server, "cached") == {}


def test_summaries_speak_of_the_cache_where_there_is_one_and_not_of_requests(
    make_server: Callable[..., Server], write_model: WriteModel
) -> None:
    write_model("cached", CACHED)
    write_model("plain", GATED)
    with make_server(cache_config=LOCAL, metrics_config={"summary_latencies": "true"}) as server:
        for model in ("cached", "plain"):
            for _ in range(3):
                server.infer(model, {"x": X})
        summaries = {
            model: dict(re.findall(rf'^(\w+)_count{{model="{model}",version="1"}} (\d+)$', page(server), re.MULTILINE))
            for model in ("cached", "plain")
        }
    assert summaries["cached"]["nv_cache_hit_summary_per_model"] == "2"
    assert summaries["cached"]["nv_cache_miss_summary_per_model"] == "1"
    assert "nv_inference_request_summary_us" not in summaries["cached"]
    assert summaries["plain"]["nv_inference_request_summary_us"] == "3"
    assert not any("cache" in name for name in summaries["plain"])


def test_the_cache_has_no_entries_of_the_previous_load(
    make_server: Callable[..., Server], write_model: WriteModel
) -> None:
    folder = write_model("cached", CACHED)
    with make_server(cache_config=LOCAL, model_control_mode="explicit", load_model=("*",)) as server:
        server.infer("cached", {"x": X})
        (folder / "1/weights").write_text("other")
        server._call(server.load, "cached", {})
        server.infer("cached", {"x": X})
        (model,) = server.served()
        assert model.snapshot().executions.execution_count == 1
        assert model.snapshot().cache_hit.count == 0


def test_simultaneous_equal_requests_cost_one_execution(
    make_server: Callable[..., Server], write_model: WriteModel, gated: type[Gated]
) -> None:
    write_model("cached", CACHED)

    async def ask(server: Server) -> None:
        gated.gate.clear()
        answers = [asyncio.ensure_future(server.infer_async("cached", {"x": X})) for _ in range(50)]
        await asyncio.sleep(0)
        answers[0].cancel()
        gated.gate.set()
        done = await asyncio.gather(*answers, return_exceptions=True)
        assert [type(each) for each in done].count(asyncio.CancelledError) == 1

    with make_server(cache_config=LOCAL) as server:
        server._call(ask, server)
        (model,) = server.served()
        assert model.snapshot().executions.execution_count <= 2
        assert model.model_queue.in_flight == 0


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"local": {"size": "0"}}, ConfigError, "didn't contain a valid 'size' field"),
        ({"local": {}}, ConfigError, "didn't contain a valid 'size' field"),
        ({"local": {"size": "many"}}, ConfigError, "'size' is 'many', expected a whole number"),
        ({"local": {"sise": "5"}}, ConfigError, "unknown parameter 'sise'; did you mean 'size'\\? known: size"),
        ({"lokal": {"size": "5"}}, LoadError, "no plugin provides cache 'lokal'; did you mean 'local'"),
        ({"local": {"size": "5"}, "other": {}}, ConfigError, "only a single cache is currently supported"),
        ({"falls": {}}, PluginError, "response cache 'falls' failed to start: ZeroDivisionError: now"),
    ],
)
def test_a_cache_that_cannot_be_stops_the_start(
    make_server: Callable[..., Server], falls: None, config: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text), make_server(cache_config=config):
        pass


class Falls(ResponseCache):
    name = "falls"

    def __init__(self, parameters: Any) -> None:
        raise ZeroDivisionError("now")

    def get(self, key: bytes) -> CachedResponse | None:
        return None

    def put(self, key: bytes, response: CachedResponse) -> None:
        return None


@pytest.fixture
def falls(monkeypatch: pytest.MonkeyPatch) -> None:
    own = builtins.register_caches
    monkeypatch.setattr(builtins, "register_caches", hookimpl(lambda: [*own(), Falls]))
