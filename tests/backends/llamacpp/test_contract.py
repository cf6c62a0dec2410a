"""The checks of the contract, and what is on the page of metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace import Server
from headrace_llm.engine_kit import check_engine
from headrace_testing.serving import on_loop
from tests.backends.llamacpp.smol import request, responses


def test_the_engine_keeps_the_contract(server: Server) -> None:
    on_loop(server, check_engine(server, "tiny"))


def test_the_use_of_the_cache_is_on_the_page(server: Server) -> None:
    def value(name: str) -> Any:
        samples = [each for family in server.engine.collect() for each in family.samples]
        return next((each.value for each in samples if each.name == name and each.labels.get("model") == "tiny"), None)

    async def scenario() -> None:
        sampling = {"max_tokens": 600, "ignore_eos": True}
        asked = [responses(server, request("Hi", "stream", model="tiny", sampling=sampling)) for _ in range(2)]
        running = asyncio.gather(*asked)
        highest = 0.0
        while not running.done():
            await asyncio.sleep(0.005)
            highest = max(highest, value("nv_llm_cache_usage_ratio") or 0)
        await running
        assert 100 / 4096 < highest <= 1210 / 4096  # of 4 slots of 1,024 tokens, two requests have at most 605 each
        while value("nv_llm_cache_usage_ratio"):
            await asyncio.sleep(0.01)

    on_loop(server, scenario())
