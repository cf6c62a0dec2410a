"""If a backend or a plugin raises a `BaseException` that is no `Exception`, its model is not served. Nothing else
fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import hookimpl
from headrace.backends.base import Backend, Instance, Isolation, Model, Tensors
from headrace.messages.ticket import Ticket
from headrace.models.served import ServedModel
from headrace.registry import PluginInfo
from headrace.server import Server
from headrace.telemetry.executions import BatchTimes, Observer

KINDS = [SystemExit, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit]
ONE = {"x": np.ones((1, 1), np.float32)}


class Strange(Backend):
    """Raises ``kind`` in the method that ``where`` names."""

    name: ClassVar[str] = "strange"
    where: ClassVar[str] = ""
    kind: ClassVar[type[BaseException]] = SystemExit

    @classmethod
    def reach(cls, place: str) -> None:
        if place == cls.where:
            raise cls.kind("stray")

    def __init__(self, options: Mapping[str, str]) -> None:
        self.reach("__init__")
        super().__init__(options)

    def complete_config(self, model: Model) -> None:
        self.reach("complete_config")

    def isolation(self, model: Model) -> Isolation | None:
        self.reach("isolation")
        return None

    def share(self, model: Model) -> None:
        self.reach("share")

    def load(self, model: Model) -> Instance:
        self.reach("load")
        return StrangeInstance()


class StrangeInstance(Instance):
    def warm_up(self) -> None:
        Strange.reach("warm_up")

    def execute(self, inputs: Tensors) -> Tensors:
        return {"y": inputs["x"]}

    def is_ready(self) -> bool:
        Strange.reach("is_ready")
        return True

    def close(self) -> None:
        Strange.reach("close")


@pytest.fixture
def server(make_server: Callable[..., Server], write_model: Any) -> Server:
    """With the models ``good`` and ``bad``."""
    write_model("good")
    path = write_model("bad")
    text = (path / "config.pbtxt").read_text()
    (path / "config.pbtxt").write_text(text.replace('"identity"', '"strange"'))
    server = make_server(exit_on_error=False)
    server.plugins.backends.add(Strange, PluginInfo("strange", "tests", "0"))
    return server


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 30))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["__init__", "complete_config", "isolation", "share", "load", "warm_up"])
def test_it_fails_the_load_of_its_model_with_a_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch, where: str, kind: type[BaseException]
) -> None:
    monkeypatch.setattr(Strange, "where", where)
    monkeypatch.setattr(Strange, "kind", kind)

    async def scenario() -> None:
        async with server:
            states = {entry.name: (entry.state, entry.reason) for entry in server.index()}
            assert states["bad"][0] == "UNAVAILABLE"
            assert f"{kind.__name__}: stray" in states["bad"][1]
            assert states["good"] == ("READY", "")
            await server.infer_async("good", ONE)

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_of_readiness_is_a_no_with_that_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Strange, "where", "is_ready")
    monkeypatch.setattr(Strange, "kind", kind)

    async def scenario() -> None:
        async with server:
            assert not await asyncio.wait_for(server.is_model_ready("bad"), 4)  # sooner than its time limit
            await server.infer_async("bad", ONE)

    run(scenario())
    assert f"Model 'bad_0' is not ready: {kind.__name__}: stray" in caplog.text


class StrayObserver(Observer):
    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def batch_finished(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        raise self.kind("stray")


@pytest.mark.parametrize("kind", KINDS)
def test_an_observer_that_raises_it_keeps_no_answer_back(
    server: Server, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Plugin:
        @hookimpl
        def observe_model(self, model: ServedModel) -> Observer:
            return StrayObserver(kind)

    server.plugins.register(Plugin())

    async def scenario() -> None:
        async with server:
            for _ in range(3):
                answer = await server.infer_async("bad", ONE)
                assert np.array_equal(np.asarray(answer.outputs["y"]), ONE["x"])

    run(scenario())
    assert caplog.messages.count("observer StrayObserver of instance 'bad_0' failed") == 3


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("hook", ["model_loaded", "model_unloaded", "server_stopping"])
def test_a_hook_that_raises_it_is_logged_and_the_server_continues(
    server: Server, kind: type[BaseException], hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    def raises() -> None:
        raise kind("stray")

    raises.__name__ = hook
    server.plugins.register(type("Plugin", (), {hook: staticmethod(hookimpl(raises))})())

    async def scenario() -> None:
        async with server:
            await server.infer_async("good", ONE)
        assert {entry.reason for entry in server.index()} == {"unloaded"}

    run(scenario())
    assert f"failed in {hook}" in caplog.text
