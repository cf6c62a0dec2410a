"""The thread of an engine, and what follows its death. Here a stand-in dies; `test_with_engine` kills vLLM's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from headrace import LoadError, Unavailable
from headrace_vllm import engine_thread as engines
from headrace_vllm.engine_thread import EngineThread


class Client:
    """What the engine's thread asks of vLLM's ``AsyncLLM``."""

    def __init__(self) -> None:
        self.errored = False
        self.has_ended = threading.Event()

    def shutdown(self) -> None:
        self.has_ended.set()


class Start:
    """Makes clients, and fails as often as ``failures`` says."""

    def __init__(self) -> None:
        self.made: list[Client] = []
        self.failures = 0
        self.died: list[str] = []
        self.again = threading.Event()

    async def __call__(self) -> Client:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no memory is left")
        self.made.append(Client())
        if len(self.made) > 1:
            self.again.set()
        return self.made[-1]

    def note_death(self, error: Unavailable) -> None:
        self.died.append(error.message)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(engines, "_FIRST_PAUSE_S", 0.01)
    return Start()


@pytest.fixture
def engine(start: Start) -> Iterator[EngineThread]:
    engine = EngineThread("m", start, start.note_death)
    yield engine
    engine.close()


def test_an_engine_that_does_not_start_says_why(start: Start) -> None:
    start.failures = 1
    with pytest.raises(LoadError, match="vLLM does not start model 'm': no memory is left"):
        EngineThread("m", start, start.note_death)


def test_work_runs_on_the_engines_loop_and_can_be_cancelled(engine: EngineThread) -> None:
    began, ended, names = threading.Event(), threading.Event(), list[str]()

    async def work() -> None:
        names.append(threading.current_thread().name)
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    engine.submit("a", work())
    assert began.wait(5)
    engine.cancel("nothing of that name")
    engine.cancel("a")
    assert ended.wait(5)
    assert names == ["m vLLM"]


def test_an_engine_that_dies_is_started_again_until_it_starts(engine: EngineThread, start: Start) -> None:
    ended, began = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    engine.submit("a", work())
    assert began.wait(5)
    first, start.failures = start.made[0], 2
    first.errored = True
    engine._loop.call_soon_threadsafe(engine.check)
    assert first.has_ended.wait(5)
    assert ended.wait(5)
    assert start.died == ["the vLLM engine of model 'm' has died; it is being started again"]
    assert start.again.wait(5)
    while engine._client is None:
        threading.Event().wait(0.001)
    assert engine.client is start.made[1]


def test_while_there_is_no_engine_requests_hear_why(engine: EngineThread, start: Start) -> None:
    start.failures = 1 << 30
    start.made[0].errored = True
    engine._loop.call_soon_threadsafe(engine.check)
    assert start.made[0].has_ended.wait(5)
    with pytest.raises(Unavailable, match="has died; it is being started again"):
        _ = engine.client
    engine.close()  # returns, though it is being started


def test_after_the_end_there_is_no_engine(start: Start) -> None:
    engine = EngineThread("m", start, start.note_death)
    engine.close()
    assert start.made[0].has_ended.is_set()
    with pytest.raises(Unavailable, match="is being unloaded"):
        _ = engine.client
    engine.cancel("a")
