"""Work away from the event loop, on real threads."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace import off_loop
from headrace.errors import InvalidArgument, Unavailable
from headrace.off_loop import OffLoopWork


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """``test`` as a test that pytest runs by itself."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Document:
    """Something that work holds."""


@on_a_loop
async def test_the_loop_goes_on_while_a_thread_works() -> None:
    go_on, heard = threading.Event(), []

    async def beside() -> None:
        heard.append("the loop")
        go_on.set()

    task = asyncio.ensure_future(beside())
    assert await OffLoopWork().run(lambda: go_on.wait(30)) is True
    assert heard == ["the loop"]
    await task


@on_a_loop
async def test_error_of_work_has_no_frames_that_hold_memory() -> None:
    document_refs: list[weakref.ref[Document]] = []

    def work() -> None:
        document = Document()
        document_refs.append(weakref.ref(document))
        raise InvalidArgument("no")

    with pytest.raises(InvalidArgument, match="no"):
        await OffLoopWork().run(work)
    assert document_refs[0]() is None


@on_a_loop
async def test_cancelled_work_in_the_queue_is_not_run_and_its_memory_is_freed() -> None:
    work, go_on, done = OffLoopWork(), threading.Event(), []
    busy = [asyncio.ensure_future(work.run(lambda: go_on.wait(30))) for _ in range(off_loop.THREADS)]
    await asyncio.sleep(0)
    document = Document()
    document_ref = weakref.ref(document)
    cancel = work.begin(lambda document=document: done.append(document), done.append)  # type: ignore[misc]
    del document
    cancel()
    assert document_ref() is None
    go_on.set()
    assert await asyncio.gather(*busy) == [True] * off_loop.THREADS
    assert await work.run(lambda: 1) == 1
    assert done == []


@on_a_loop
async def test_more_than_may_wait_is_refused_and_soon_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(off_loop, "WAITING", 3)
    work, go_on = OffLoopWork(), threading.Event()
    waiting = [asyncio.ensure_future(work.run(lambda: go_on.wait(30))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="3 large requests and answers wait"):
        await work.run(lambda: True)
    with pytest.raises(Unavailable, match=r"^\[request id: 7\] 3 large requests and answers wait"):
        await work.run(lambda: True, "[request id: 7] ")
    go_on.set()
    assert all(await asyncio.gather(*waiting))
    assert await work.run(lambda: 2) == 2


@on_a_loop
async def test_the_switch_interval_is_shorter_only_while_work_runs() -> None:
    usual = sys.getswitchinterval()
    assert await OffLoopWork().run(sys.getswitchinterval) == pytest.approx(off_loop.SWITCH_S, rel=0.01)
    assert sys.getswitchinterval() == usual


@on_a_loop
async def test_refused_work_is_freed_at_once() -> None:
    """The garbage collector is not needed for that."""

    def refuse(document: Document) -> None:
        raise InvalidArgument("no")

    document = Document()
    document_ref = weakref.ref(document)
    job = functools.partial(refuse, document)
    del document
    gc.disable()
    try:
        await OffLoopWork().run(job)
    except InvalidArgument:
        pass
    finally:
        gc.enable()
    del job
    assert document_ref() is None


@on_a_loop
async def test_failed_work_is_freed_without_the_garbage_collector() -> None:
    def fail(document: Document) -> None:
        raise ValueError("no")

    def finish(outcome: object) -> None:
        try:
            assert isinstance(outcome, ValueError)
            raise outcome
        except ValueError:
            finished.set()
        finally:
            del outcome

    document, finished = Document(), asyncio.Event()
    document_ref = weakref.ref(document)
    OffLoopWork().begin(functools.partial(fail, document), finish)
    del document
    await finished.wait()
    deadline = time.monotonic() + 20
    while document_ref() is not None and time.monotonic() < deadline:
        await asyncio.sleep(0.001)  # the thread is about to let it go
    assert document_ref() is None


@on_a_loop
async def test_work_that_ends_after_the_close_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(off_loop, "QUIET_S", 0.0)
    failures = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    work, go_on, done = OffLoopWork(), threading.Event(), asyncio.Event()
    work.begin(lambda: go_on.wait(30), lambda _: done.set())
    work.close()
    go_on.set()
    await done.wait()
    for _ in range(5):
        await asyncio.sleep(0.001)  # the turns in which memory would be returned
    assert not failures


@on_a_loop
async def test_memory_of_the_last_large_work_is_returned_after_a_quiet_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(off_loop, "QUIET_S", 0.05)
    trimmed = threading.Semaphore(0)
    monkeypatch.setattr(off_loop, "release_memory", trimmed.release)
    work = OffLoopWork()
    for _ in range(3):  # each puts it off
        work.release_memory_later()
    for _ in range(off_loop.THREADS):
        assert await asyncio.to_thread(trimmed.acquire, timeout=30)
    assert not trimmed.acquire(blocking=False)
    work.release_memory_later()
    work.close()
