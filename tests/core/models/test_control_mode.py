"""A control mode of a plugin in a real server: requests that wait for its loads, and the responses of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headrace import (
    AnyOperation,
    Caller,
    ConfigError,
    ControlMode,
    HeadraceError,
    InferRequest,
    InvalidArgument,
    LoadControl,
    LoadError,
    NotFound,
    Unavailable,
    Unsupported,
    hookimpl,
)
from headrace.engine import Engine
from headrace.messages.request import as_tensors
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.server import Server

CONFIG = """
backend: "identity"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
WRONG = CONFIG.replace("identity", "no_such")


class Lazy(ControlMode):
    """Loads each model on its first request, and keeps it."""

    name = "lazy"
    loaded = 0
    changes = 0
    models: LoadControl

    async def start(self) -> list[HeadraceError]:
        self.models = LoadControl(self.parts)
        return []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Awaitable[None] | None:
        return self._load(model) if model == "asked" and not self.models.served(model) else None

    async def _load(self, name: str) -> None:
        if await self.models.find(name) is not None and not self.models.served(name):
            await self.models.load(name)

    async def hold(self, name: str) -> Callable[[], None]:
        await self._load(name)
        self.loaded += 1
        return self._release

    def _release(self) -> None:
        self.loaded -= 1

    def is_ready(self, name: str) -> bool:
        return name == "m"

    def why_not_served(self, name: str) -> str:
        return f"{name} is lazy"

    def changed(self) -> None:
        self.changes += 1


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch, write_model: Any, make_server: Callable[..., Server]) -> Callable[[], Server]:
    """Makes servers in the mode, with a model that can be loaded and one that can not."""
    discover = Plugins.discover
    plugin = ModuleType("test")
    plugin.register_interceptors = hookimpl(lambda: [Lazy])  # type: ignore[attr-defined]

    def more(allow: Any = None) -> Plugins:
        plugins = discover(allow)
        plugins._add(PluginInfo("test", "test", "1"), lambda: plugin)
        return plugins

    monkeypatch.setattr(Plugins, "discover", more)
    write_model("m", CONFIG)
    write_model("wrong", WRONG)
    return lambda: make_server(model_control_mode="lazy")


def run(server: Server, scenario: Callable[[Engine, Lazy], Awaitable[None]]) -> None:
    async def main() -> None:
        async with server:
            mode = server.engine.mode
            assert isinstance(mode, Lazy)
            await scenario(server.engine, mode)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_program_waits_for_the_load_and_holds_the_model_until_it_is_admitted(lazy: Callable[[], Server]) -> None:
    server = lazy()

    async def scenario(engine: Engine, mode: Lazy) -> None:
        assert mode.models.all_served() == []
        answer = await server.infer_async("m", {"x": np.array([3], np.float32)})
        assert np.array_equal(answer.outputs["y"], [3])
        assert mode.models.all_served() == ["m"]
        assert (mode.loaded, mode.changes) == (0, 1)
        await mode.models.unload("m")
        assert mode.changes == 2
        request = InferRequest("m", as_tensors({"x": np.array([4], np.float32)}))
        assert [bool(each.outputs["y"] == 4) async for each in engine.responses(request)] == [True]

    run(server, scenario)


def test_an_unload_returns_when_the_instances_have_closed(lazy: Callable[[], Server]) -> None:
    async def scenario(engine: Engine, mode: Lazy) -> None:
        await mode.models.load("m")
        (served,) = mode.models.served("m")
        await mode.models.unload("m")
        assert not any(executor.alive for executor in served.executors)
        assert mode.models.served("m") == []

    run(lazy(), scenario)


def test_a_model_is_found_with_its_config_and_the_size_of_its_files(lazy: Callable[[], Server], tmp_path: Any) -> None:
    server = lazy()
    version = next(tmp_path.rglob("m/1"))
    (version / "weights").write_bytes(b"x" * 1000)
    (version.parent / "not_of_a_version").write_bytes(b"x" * 1000)

    async def scenario(engine: Engine, mode: Lazy) -> None:
        model = await mode.models.find("m")
        assert model is not None
        assert (model.file_bytes, model.config.backend, sorted(model.needed)) == (1000, "identity", [])
        assert await mode.models.find("m") is model  # nothing has changed
        (version / "weights").write_bytes(b"x" * 2000)
        model = await mode.models.find("m")
        assert model is not None
        assert model.file_bytes == 2000
        assert await mode.models.find("nope") is None
        with pytest.raises(LoadError):
            await mode.models.load("nope")

    run(server, scenario)


def test_clients_see_what_can_be_loaded(lazy: Callable[[], Server]) -> None:
    async def scenario(engine: Engine, mode: Lazy) -> None:
        assert engine.ready
        assert [(e.name, e.state, e.reason) for e in await engine.list_repository()] == [
            ("m", "UNAVAILABLE", "m is lazy"),
            ("wrong", "UNAVAILABLE", "wrong is lazy"),
        ]
        assert engine.is_model_alive("m") is True
        assert await engine.check_model("m")
        assert await engine.is_model_ready("m")
        with pytest.raises(NotFound):
            engine.is_model_alive("wrong")
        await mode.models.load("m")
        (served,) = mode.models.served("m")
        served.memory_bytes = 42
        (line,) = await engine.list_repository(ready_only=True)
        assert (line.name, line.state, line.memory_bytes) == ("m", "READY", 42)
        assert engine.explain("m")["memory_bytes"] == 42

    run(lazy(), scenario)


def test_the_server_is_ready_although_a_model_fails_to_load(lazy: Callable[[], Server]) -> None:
    async def scenario(engine: Engine, mode: Lazy) -> None:
        with pytest.raises(Exception, match="wrong"):
            await mode.models.load("wrong")
        assert engine.ready

    run(lazy(), scenario)


def test_loads_by_name_are_the_modes_to_allow(lazy: Callable[[], Server]) -> None:
    async def scenario(engine: Engine, mode: Lazy) -> None:
        with pytest.raises(Unsupported, match="a load by name is not allowed in model control mode 'lazy'"):
            await engine.load("m")
        with pytest.raises(Unsupported, match="an unload by name"):
            await engine.unload("m")
        with pytest.raises(Unsupported, match="a load with parameters"):
            await engine.load("m", {"config": "{}"})
        with pytest.raises(InvalidArgument):
            await engine.load("../m")

    run(lazy(), scenario)


def test_a_mode_that_no_plugin_has_is_refused(make_server: Callable[..., Server]) -> None:
    text = "invalid argument for --model-control-mode, must be one of none, poll, explicit. Got x"
    with pytest.raises(ConfigError) as caught:
        make_server(model_control_mode="x")
    assert caught.value.message == f'Bad option: "--model-control-mode".\n{text}'


def test_a_refusal_has_the_time_to_retry() -> None:
    assert Unavailable("later", retry_after_s=2).retry_after_s == 2
    assert Unavailable("later").retry_after_s is None
