"""The asyncio loop of an instance."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from headrace_python.coroutines import Coroutines

WHO = contextvars.ContextVar("WHO", default="nobody")


@pytest.fixture
def coroutines() -> Iterator[Coroutines]:
    made = Coroutines("m")
    yield made
    made.close()


async def who() -> tuple[str, str]:
    return WHO.get(), threading.current_thread().name


async def leave() -> None:
    raise SystemExit(3)


def test_a_coroutine_runs_on_the_loops_thread_in_the_callers_context(coroutines: Coroutines) -> None:
    token = WHO.set("me")
    try:
        assert coroutines.run(who()) == ("me", "m-asyncio")
    finally:
        WHO.reset(token)


def test_the_loop_survives_a_coroutine_that_exits(coroutines: Coroutines, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit, match="3"):
        coroutines.run(leave())
    assert caplog.text == ""
    assert coroutines.run(who())[0] == "nobody"


def test_a_task_that_exits_does_not_stop_others(coroutines: Coroutines, caplog: pytest.LogCaptureFixture) -> None:
    async def begin() -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(leave())
        await asyncio.wait([task])
        assert isinstance(task.exception(), SystemExit)
        return task

    assert coroutines.run(begin()).done()
    assert "a task of a model has called exit" in caplog.text


def test_closing_cancels_waiting_coroutines_and_ends_the_thread(coroutines: Coroutines) -> None:
    waiting, seen = threading.Event(), []

    async def wait_for_ever() -> None:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(threading.current_thread())

    future = coroutines.start(wait_for_ever())
    assert waiting.wait(10)
    coroutines.close()
    with pytest.raises(CancelledError):
        future.result(10)
    seen[0].join(10)
    assert not seen[0].is_alive()


def test_closing_without_a_run_does_nothing() -> None:
    Coroutines("m").close()
