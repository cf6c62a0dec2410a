"""Loads that never end: they fail in time, their threads are counted, and nothing else waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.backends.base import Backend, Instance, Model, Tensors
from headrace.errors import HeadraceError
from headrace.models import abandoned_loads, states
from headrace.registry import PluginInfo
from headrace.server import Server

CONFIG = """
backend: "stuck" max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: [-1] }} output {{ name: "y" data_type: TYPE_FP32 dims: [-1] }}
parameters {{ key: "load_timeout_seconds" value {{ string_value: "{timeout_s}" }} }}
"""


class Stuck(Backend):
    """Its models named ``stuck...`` do not load, and do not execute, before they are let go."""

    name: ClassVar[str] = "stuck"
    let_go: ClassVar[threading.Event]
    #: The number of closed instances.
    closed: ClassVar[list[str]]

    def load(self, model: Model) -> Instance:
        if model.name == "stuck":
            self.let_go.wait(60)
        return StuckInstance(self, model.name)


class StuckInstance(Instance):
    def __init__(self, backend: Stuck, name: str) -> None:
        self._backend, self._name = backend, name

    def execute(self, inputs: Tensors) -> Tensors:
        if self._name == "busy":
            self._backend.let_go.wait(60)
        return {"y": inputs["x"]}

    def close(self) -> None:
        self._backend.closed.append(self._name)


@pytest.fixture
def stuck() -> Iterator[type[Stuck]]:
    Stuck.let_go, Stuck.closed = threading.Event(), []
    yield Stuck
    Stuck.let_go.set()


@pytest.fixture
def start(
    make_server: Callable[..., Server], stuck: type[Stuck], write_model: Callable[..., Any]
) -> Callable[..., Server]:
    for name in ("stuck", "busy", "quick"):
        write_model(name, CONFIG.format(timeout_s=1))

    def start(**options: Any) -> Server:
        server = make_server(model_control_mode="explicit", **options)
        server.plugins.backends.add(Stuck, PluginInfo("stuck", "tests", "0"))
        return server

    return start


async def refusal(server: Server, name: str) -> str:
    with pytest.raises(HeadraceError) as raised:
        await server.load(name, {})
    return raised.value.message


def test_a_load_that_never_ends_fails_in_time_and_after_three_the_model_is_refused(
    start: Callable[..., Server], stuck: type[Stuck]
) -> None:
    async def scene() -> None:
        async with start(model_load_thread_count=1) as server:
            for _ in range(abandoned_loads.MOST):
                reason = await refusal(server, "stuck")
                assert "model 'stuck' did not load within 1 s (parameter 'load_timeout_seconds'" in reason
                assert "its thread, which cannot be ended, is left behind" in reason
            assert "model 'stuck' is not loaded: 3 threads of earlier loads have not ended" in await refusal(
                server, "stuck"
            )
            index = {line.name: line for line in server.index()}
            assert index["stuck"].state == "UNAVAILABLE"
            await server.load("quick", {})  # the slot is free again
            stuck.let_go.set()
            while len(stuck.closed) < abandoned_loads.MOST:  # the late instance is closed
                await asyncio.sleep(0.01)
            await server.load("stuck", {})
            assert await server.is_model_ready("stuck")

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("action", ["unload", "stop"])
def test_a_load_that_never_ends_holds_up_neither_unload_nor_stop(
    action: str,
    start: Callable[..., Server],
    write_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abandoned_loads, "GRACE_S", 0.1)
    write_model("stuck", CONFIG.format(timeout_s=600))

    async def scene() -> str:
        server = start()
        await server.start()
        load = asyncio.ensure_future(refusal(server, "stuck"))
        while not any(line.state == "LOADING" for line in server.index()):
            await asyncio.sleep(0.01)
        if action == "unload":
            await server.unload("stuck")
        await server.stop()
        assert server.has_left_threads
        return await load

    reason = asyncio.run(asyncio.wait_for(scene(), 20))
    why = {"unload": "was unloaded while it was being loaded", "stop": "was being loaded when the server stopped"}
    assert why[action] in reason


def test_an_unload_logs_that_it_waits_for_an_execution_that_never_ends(
    start: Callable[..., Server],
    stuck: type[Stuck],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(states, "LATE_S", 0.1)

    async def scene() -> None:
        async with start() as server:
            await server.load("busy", {})
            inference = asyncio.ensure_future(server.infer_async("busy", {"x": np.ones((1, 1), np.float32)}))
            while server.served("busy")[0].snapshot().pending or not server.served("busy")[0].executors[0].executing:
                await asyncio.sleep(0.01)
            await server.unload("busy")
            thread = "a thread of the server, which cannot be ended before its execution returns"
            expected = f"waits for its requests since 0.1 s: 'busy_0' executes on {thread}"
            while not (lines := [each for each in server.index() if each.reason]):
                await asyncio.sleep(0.01)
            assert [(line.name, line.state, line.reason) for line in lines] == [("busy", "UNLOADING", expected)]
            assert f"'busy' version 1 {expected}" in caplog.messages
            stuck.let_go.set()
            await inference
            while {line.reason for line in server.index()} != {"unloaded"}:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("timeout_s", ["0", "-1", "soon", "1.5"])
def test_a_bound_that_is_none_is_refused(
    timeout_s: str, start: Callable[..., Server], write_model: Callable[..., Any]
) -> None:
    write_model("quick", CONFIG.format(timeout_s=timeout_s))

    async def scene() -> None:
        async with start() as server:
            expected = f"parameter 'load_timeout_seconds' is '{timeout_s}', expected a number of seconds above 0"
            assert expected in await refusal(server, "quick")

    asyncio.run(scene())


def test_the_option_of_the_backend_is_the_default_limit_of_its_models(
    start: Callable[..., Server], write_model: Callable[..., Any]
) -> None:
    write_model("stuck", CONFIG.replace("load_timeout_seconds", "another").format(timeout_s=1))

    async def scene(text: str) -> str:
        server = start(backend_config={"stuck": {"load-timeout-seconds": text}})
        async with server:
            return await refusal(server, "stuck")

    assert "did not load within 2 s" in asyncio.run(scene("2"))
    wrong = "backend option load-timeout-seconds of 'stuck' is 'never', expected a number of seconds above 0"
    assert wrong in asyncio.run(scene("never"))


def test_names_that_clients_choose_are_not_kept() -> None:
    async def scene() -> None:
        left = abandoned_loads.AbandonedLoads()
        loop = asyncio.get_running_loop()
        for number in range(100):
            name = f"m{number}"
            left.end_soon(name, "was unloaded")
            running = loop.create_future()
            with pytest.raises(HeadraceError, match="did not load within 0 s"):
                await left.wait(name, 0.0, "the test", len, running)
            assert left.has(name)
            running.set_result("loaded")
            while left.has(name):
                await asyncio.sleep(0)
        assert not left._waits
        assert not left._count

    asyncio.run(scene())
