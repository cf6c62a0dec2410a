"""Slots: who gets one, and when it is free again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from headrace import InferResponse, ResourceExhausted, Server
from headrace_llamacpp.instance import LlamaInstance
from headrace_testing.serving import on_loop
from tests.backends.llamacpp.smol import request, responses, text

LONG = {"max_tokens": 200, "ignore_eos": True}


def instance(name: str = "smol") -> Any:
    """Return the instance of the model ``name``, of this process."""
    import gc

    return next(each for each in gc.get_objects() if type(each) is LlamaInstance and each._name == name)


def run(server: Server, scenario: Awaitable[None]) -> None:
    on_loop(server, scenario)  # type: ignore[arg-type]


class Stream:
    """A request whose first response has come."""

    def __init__(self, server: Server, prompt: str = "One", **more: Any) -> None:
        self.given: list[InferResponse] = []
        self.task = asyncio.ensure_future(self._read(server, request(prompt, "stream", sampling=LONG, **more)))

    async def _read(self, server: Server, sent: Any) -> None:
        async for response in server.engine.responses(sent):
            self.given.append(response)

    async def begun(self) -> None:
        while not self.given and not self.task.done():
            await asyncio.sleep(0.001)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))


def test_a_caller_that_leaves_frees_its_slot_within_a_step_and_the_others_go_on(server: Server) -> None:
    async def scenario() -> None:
        streams = [Stream(server, word) for word in ("One", "Two", "Three", "Four")]
        for stream in streams:
            await stream.begun()
        waiting = Stream(server, "Five")
        await asyncio.sleep(0.05)
        assert not waiting.given
        before = [len(stream.given) for stream in streams]
        await streams[0].leave()
        while instance()._queue:
            await asyncio.sleep(0.001)
        steps = [len(stream.given) - count for stream, count in zip(streams[1:], before[1:], strict=True)]
        await waiting.begun()
        assert max(steps) <= 3
        assert all(len(stream.given) > count for stream, count in zip(streams[1:], before[1:], strict=True))
        for stream in (*streams[1:], waiting):
            await stream.leave()

    run(server, scenario())


def test_the_best_priority_is_next_and_one_that_has_left_takes_no_slot(server: Server) -> None:
    async def scenario() -> None:
        running = [Stream(server) for _ in range(4)]
        for stream in running:
            await stream.begun()
        order: list[str] = []

        async def wait(name: str, priority: int) -> None:
            await responses(server, request(name, "stream", sampling={"max_tokens": 1}, priority=priority))
            order.append(name)

        waiting = {}
        for name, priority in (("none", 0), ("left", 1), ("second", 2), ("first", 1)):
            waiting[name] = asyncio.ensure_future(wait(name, priority))
            await asyncio.sleep(0.01)
        waiting.pop("left").cancel()
        await running[0].leave()
        await asyncio.wait(waiting.values())
        assert order == ["first", "second", "none"]
        for stream in running[1:]:
            await stream.leave()

    run(server, scenario())


def test_the_prompt_is_counted_before_its_first_token(server: Server) -> None:
    """A quota charges it to a caller that leaves meanwhile. The 60 tokens take 0.5 s."""

    def counted() -> float:
        families = {family.name: family.samples for family in server.engine.collect()}
        return sum(each.value for each in families["nv_llm_input_tokens"] if each.labels["model"] == "smol")

    async def scenario() -> None:
        before = counted()
        task = asyncio.ensure_future(responses(server, request(input_ids=[7] * 60, sampling={"max_tokens": 1})))
        while counted() < before + 60:
            await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()
        while instance()._running:
            await asyncio.sleep(0.01)

    run(server, scenario())


def test_500_streams_on_4_slots_are_served_up_to_the_limit_and_the_others_refused(server: Server) -> None:
    async def scenario() -> None:
        while instance("tiny")._streams:  # of the test before
            await asyncio.sleep(0.01)
        sampling = {"max_tokens": 4, "ignore_eos": True}
        asked = [request("Hi", "stream", model="tiny", sampling=sampling) for _ in range(500)]
        given = await asyncio.gather(*(responses(server, each) for each in asked), return_exceptions=True)
        refused = [each for each in given if isinstance(each, ResourceExhausted)]
        served = [each for each in given if isinstance(each, list)]
        assert len(refused) + len(served) == 500
        assert len(served) >= 256
        assert "its limit (max_streams) is 256" in str(refused[0])
        assert {len(text(each)) for each in served} == {4}

    run(server, scenario())
