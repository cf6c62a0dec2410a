"""`nv_inference_first_response_histogram_ms`: the models that have it, counts and buckets, as in Triton's own test."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import pytest

from headrace.errors import HeadraceError
from headrace.messages.request import InferRequest
from headrace.server import Server
from headrace.telemetry.first_responses import FirstResponseTimes
from headrace_http import text_format
from tests.core.countdown import CONFIG, with_countdowns

BUCKETS = """
model_metrics { metric_control {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ -1, 0.0, 1, 2.5 ] }
} }
"""


async def ask(server: Server, model: str, number: int) -> int:
    """Return the number of responses before the end, or the error."""
    count = 0
    try:
        async for _ in server.engine.responses(InferRequest(model, {"n": np.array([number], np.int32)})):
            count += 1
    except HeadraceError:
        assert number >= 13
    return count


def lines(server: Server) -> list[str]:
    page = text_format.text(server.engine.collect())
    return re.findall(r"^nv_inference_first_response_histogram_ms.*", page, re.MULTILINE)


@pytest.fixture
def make(write_model: Any, make_server: Callable[..., Server]) -> Callable[[str], Server]:
    def make(setting: str) -> Server:
        write_model("m", CONFIG)
        write_model("own", CONFIG + BUCKETS)
        write_model("single", CONFIG.replace("true", "false"))
        return with_countdowns(make_server(metrics_config={"histogram_latencies": setting}))

    return make


def test_first_responses_of_decoupled_models_are_counted(make: Callable[[str], Server]) -> None:
    async def main() -> None:
        async with make("true") as server:
            before = lines(server)
            began = monotonic()
            # Several responses count once; no response, and an error first, count not; an error behind one does.
            assert [await ask(server, "m", number) for number in (3, 1, 0, 13, 14)] == [3, 1, 0, 0, 1]
            took_ms = (monotonic() - began) * 1000
            after = dict(line.rsplit(" ", 1) for line in lines(server))
        family = "nv_inference_first_response_histogram_ms"
        le = [re.findall(r'model="(\w+)".*le="(.*)"', line) for line in before if "_bucket" in line]
        assert [pair for (pair,) in le] == [
            *(("m", bound) for bound in ("100", "500", "2000", "5000", "+Inf")),
            *(("own", bound) for bound in ("-1", "0", "1", "2.5", "+Inf")),
        ]
        assert {line.rsplit(" ", 1)[1] for line in before} == {"0"}
        assert int(after[f'{family}_count{{model="m",version="1"}}']) == 3
        assert 0 <= int(after[f'{family}_sum{{model="m",version="1"}}']) <= 3 * took_ms
        assert after[f'{family}_bucket{{model="m",version="1",le="+Inf"}}'] == "3"

    asyncio.run(main())


def test_without_the_setting_there_is_no_histogram(make: Callable[[str], Server]) -> None:
    async def main() -> None:
        async with make("false") as server:
            await ask(server, "m", 1)
            assert lines(server) == []

    asyncio.run(main())


def test_a_duration_is_in_the_first_bucket_that_is_not_below_it() -> None:
    times = FirstResponseTimes((1, 2.5))
    for took_ns in (0, 1_000_000, 1_999_999, 2_000_000, 2_999_999, 3_000_000):
        times.record(took_ns)
    assert (times.counts, times.total) == ([3, 2, 1], 0 + 1 + 1 + 2 + 2 + 3)
