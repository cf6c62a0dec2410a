"""Readiness checks of instances, on threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from headrace.backends.base import Backend, Instance, Model, Tensors
from headrace.models import readiness
from headrace.models.readiness import Readiness
from headrace.models.states import ModelRecord, State, VersionRecord, index_of
from headrace.registry import PluginInfo
from headrace.server import Server


@dataclass
class CheckedHost:
    """A host whose instance answers as the test sets it up. It counts the checks."""

    answer: Callable[[], bool]
    name: str = "m_0"
    has_check: bool = True
    checks: list[str] = field(default_factory=list)

    def check_ready(self) -> bool:
        self.checks.append(threading.current_thread().name)
        return self.answer()


def readiness_of(*hosts: CheckedHost) -> Readiness:
    return Readiness(hosts)  # type: ignore[arg-type]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def raises() -> bool:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("answers", "ready"),
    [([lambda: True] * 3, True), ([lambda: True, lambda: False], False), ([raises, lambda: True], False), ([], True)],
)
def test_a_model_is_ready_if_all_instances_are_and_an_exception_means_not_ready(
    answers: list[Callable[[], bool]], ready: bool
) -> None:
    assert run(readiness_of(*map(CheckedHost, answers)).check()) is ready


def test_why_an_instance_is_not_ready_is_logged_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headrace")
    host = CheckedHost(raises)
    readiness = readiness_of(host)

    async def ask_three_times() -> None:
        for _ in range(3):
            await readiness.check()

    run(ask_three_times())
    host.answer = lambda: False
    run(ask_three_times())
    host.answer = lambda: True
    run(ask_three_times())
    assert caplog.messages == [
        "Model 'm_0' is not ready: ValueError: no",
        "Model 'm_0' is not ready: user-defined check failed",
        "Model 'm_0' is ready again",
    ]


def test_an_instance_without_a_check_is_not_asked() -> None:
    host = CheckedHost(raises, has_check=False)
    readiness = readiness_of(host)
    assert not readiness.has_checks
    assert run(readiness.check())
    assert host.checks == []


def test_simultaneous_readiness_checks_share_one_result_and_the_next_gets_a_new_one() -> None:
    gate = threading.Event()
    host = CheckedHost(lambda: gate.wait(20))

    async def scenario() -> None:
        readiness = readiness_of(host)
        asking = [asyncio.ensure_future(readiness.check()) for _ in range(50)]
        while not host.checks:
            await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(*asking) == [True] * 50
        assert host.checks == ["headrace-ready"]
        assert await readiness.check()
        assert len(host.checks) == 2

    run(scenario())


def test_a_cancelled_check_does_not_cancel_that_of_others() -> None:
    gate = threading.Event()
    host = CheckedHost(lambda: gate.wait(20))

    async def scenario() -> None:
        readiness = readiness_of(host)
        leaving, staying = asyncio.ensure_future(readiness.check()), asyncio.ensure_future(readiness.check())
        while not host.checks:
            await asyncio.sleep(0)
        leaving.cancel()
        gate.set()
        assert await staying
        assert leaving.cancelled()

    run(scenario())


def test_a_check_that_takes_too_long_is_a_no_and_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "TIMEOUT_S", 0.05)
    gate = threading.Event()
    host = CheckedHost(lambda: gate.wait(20))

    async def scenario() -> None:
        readiness = readiness_of(host)
        for _ in range(3):
            assert not await readiness.check()
        assert len(host.checks) == 1
        gate.set()
        while not await readiness.check():
            await asyncio.sleep(0.01)

    run(scenario())


def test_each_check_waits_as_long_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    host = CheckedHost(lambda: gate.wait(20))

    async def scenario() -> None:
        found = readiness_of(host)
        monkeypatch.setattr(readiness, "TIMEOUT_S", 0.05)
        assert not await found.check()
        monkeypatch.setattr(readiness, "TIMEOUT_S", 20.0)
        late = asyncio.ensure_future(found.check())
        await asyncio.wait((late,), timeout=0.05)
        gate.set()
        assert await late
        assert len(host.checks) == 1

    run(scenario())


def test_a_check_that_outlives_its_server_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "TIMEOUT_S", 0.05)
    gate = threading.Event()
    problems: list[object] = []
    monkeypatch.setattr(threading, "excepthook", problems.append)
    assert not run(readiness_of(CheckedHost(lambda: gate.wait(20))).check())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "headrace-ready"]
    gate.set()
    thread.join(20)
    assert problems == []


class Moody(Instance):
    """Ready if the gate of its model is open; slow, because it blocks."""

    gate: ClassVar[threading.Event]
    ready: ClassVar[bool]

    def execute(self, inputs: Tensors) -> Tensors:
        return {"y": inputs["x"]}

    def is_ready(self) -> bool:
        self.gate.wait(20)
        return self.ready


class MoodyBackend(Backend):
    name: ClassVar[str] = "moody"

    def load(self, model: Model) -> Moody:
        return Moody()


CONFIG = """
backend: "moody" input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }
"""


def test_a_server_answers_others_while_an_instance_thinks_about_its_readiness(
    write_model: Any, make_server: Callable[..., Server]
) -> None:
    write_model("m", CONFIG)
    write_model("plain")
    Moody.gate, Moody.ready = threading.Event(), True

    async def scenario() -> None:
        server = make_server()
        server.plugins.backends.add(MoodyBackend, PluginInfo("moody", "tests", "0"))
        async with server:
            assert server.ready
            assert server.engine.has_checks
            assert server.resolve("m").has_checks
            assert not server.resolve("plain").has_checks
            asking = [asyncio.ensure_future(check) for check in (server.check_ready(), server.is_model_ready("m"))]
            assert await server.is_model_ready("plain", "1")
            assert not await server.is_model_ready("plain", "2")
            assert not await server.is_model_ready("nobody")
            assert not any(check.done() for check in asking)
            Moody.gate.set()
            assert await asyncio.gather(*asking) == [True, True]
            Moody.ready = False
            assert not await server.check_ready()
            assert not await server.is_model_ready("m", "1")
            assert [(line.name, line.state) for line in server.index()] == [("m", "READY"), ("plain", "READY")]

    run(scenario())


def test_without_strict_readiness_no_instance_is_asked(write_model: Any, make_server: Callable[..., Server]) -> None:
    write_model("m", CONFIG)
    Moody.gate, Moody.ready = threading.Event(), False

    async def scenario() -> None:
        server = make_server(strict_readiness=False)
        server.plugins.backends.add(MoodyBackend, PluginInfo("moody", "tests", "0"))
        async with server:
            assert not server.engine.has_checks
            assert await server.check_ready()

    run(scenario())


@dataclass
class Served:
    ready: bool
    reason: str = ""


def test_the_index_shows_why_a_version_that_was_loaded_cannot_execute_now() -> None:
    record = ModelRecord("m")
    record.versions[1] = VersionRecord(State.READY, "", Served(False, "instance 'm_0' died: killed"))  # type: ignore[arg-type]
    record.versions[2] = VersionRecord(State.READY, "", Served(True))  # type: ignore[arg-type]
    lines = [(line.version, line.state, line.reason) for line in index_of(record, ready_only=False)]
    assert lines == [("1", "UNAVAILABLE", "Unavailable: instance 'm_0' died: killed"), ("2", "READY", "")]
    assert [line.version for line in index_of(record, ready_only=True)] == ["2"]
