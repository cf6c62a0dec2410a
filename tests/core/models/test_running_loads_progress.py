"""The log lines while models are loaded."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from headrace.backends.base import Backend, Instance, Model, Tensors
from headrace.models import running_loads
from headrace.registry import PluginInfo
from headrace.server import Server

CONFIG = """
backend: "held" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""


class Held(Backend):
    """Loads ``slow`` when it is let go, everything else at once."""

    name: ClassVar[str] = "held"
    let_go: ClassVar[threading.Event]

    def load(self, model: Model) -> Instance:
        if model.name == "slow":
            self.let_go.wait(20)
        return Echo()


class Echo(Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        return {"y": inputs["x"]}


@pytest.fixture
def server(make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: Any) -> Server:
    """Serves ``fast`` and ``slow``, and logs its progress a hundred times a second."""
    Held.let_go = threading.Event()
    monkeypatch.setattr(running_loads, "INTERVAL_S", 0.01)
    caplog.set_level("INFO", "headrace")
    made = make_server(model_control_mode="explicit", load_model=("*",), exit_on_error=False)
    made.plugins.backends.add(Held, PluginInfo("held", "tests", "0"))
    return made


async def wait_for_line(caplog: pytest.LogCaptureFixture, pattern: str) -> None:
    while not any(re.fullmatch(pattern, message) for message in caplog.messages):
        await asyncio.sleep(0)


def test_a_long_load_is_logged_repeatedly_with_the_slowest_model(
    write_model: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("fast", "slow"):
        write_model(name, CONFIG)
    write_model("wrong", 'backend: "nobody"')
    line = r"still loading: 1 of 3 models \(1 failed\) loaded after \d+ s, 1 being loaded, longest: slow \(\d+\.\d s\)"

    async def scenario() -> None:
        starting = asyncio.ensure_future(server.start())
        await wait_for_line(caplog, line)
        caplog.clear()
        await wait_for_line(caplog, line)  # and once more
        Held.let_go.set()
        await starting
        await server.stop()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert re.search(r"^successfully loaded 'slow' in \d+\.\d s, 2 of 3$", "\n".join(caplog.messages), re.MULTILINE)
    (end,) = [message for message in caplog.messages if message.startswith("loaded ")]
    assert re.fullmatch(r"loaded 2 of 3 models \(1 failed\) in \d+\.\d s, longest: \w+ \(\d+\.\d s\)", end)
    assert caplog.messages[-1] != end  # and the progress is no longer logged
    after = caplog.messages[caplog.messages.index(end) :]
    assert not [message for message in after if message.startswith("still loading")]


def test_a_load_by_name_is_logged_too(write_model: Any, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with server:
            await asyncio.to_thread(write_model, "slow", CONFIG)
            loading = asyncio.ensure_future(server.load("slow"))
            await wait_for_line(
                caplog, r"still loading: 0 of 1 models loaded after \d+ s, 1 being loaded, longest: slow \(\d.\d s\)"
            )
            Held.let_go.set()
            await loading

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_model_of_several_versions_is_logged_as_loaded_once(
    write_model: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    write_model("many", CONFIG + "version_policy { all { } }", (1, 2, 3))

    async def scenario() -> None:
        async with server:
            assert server.ready_versions("many") == [1, 2, 3]

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert len([message for message in caplog.messages if message.startswith("successfully loaded 'many'")]) == 1
    assert sorted(message for message in caplog.messages if message.startswith("loading: ")) == [
        f"loading: many:{number}" for number in (1, 2, 3)
    ]


def test_the_longest_is_counted_from_when_a_thread_has_begun_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace")
    now = 0.0
    monkeypatch.setattr(running_loads, "monotonic", lambda: now)

    async def scenario() -> None:
        nonlocal now
        with running_loads.Progress(["early", "late"]) as progress:
            progress.began("early")
            now = 10.0
            progress.began("late")
            progress.began("early")  # its second version
            now = 12.0
            progress.loaded("early")
            now = 17.5
            progress.loaded("late")

    asyncio.run(scenario())
    assert caplog.messages == [
        "successfully loaded 'early' in 12.0 s, 1 of 2",
        "successfully loaded 'late' in 7.5 s, 2 of 2",
        "loaded 2 of 2 models in 17.5 s, longest: early (12.0 s)",
    ]
