"""A cache that may block: it is called on threads, requests do not wait long for it, and it may fail."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from headrace.caches import remote_calls
from headrace.caches.base import CachedResponse, ResponseCache
from headrace.errors import Cancelled
from headrace.schedulers.dynamic import DynamicScheduler
from tests.core.schedulers.test_caching_queue import CachedStage, staged, until

Y = np.full((1, 4), 2.0, np.float32)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups have as long as a busy machine takes, and a failure pauses the cache to the end of the test."""
    monkeypatch.setattr(remote_calls, "TIMEOUT_S", 90.0)
    monkeypatch.setattr(remote_calls, "RETRY_S", 90.0)


class Shelf(ResponseCache):
    """A cache in a dictionary that waits at a gate. ``threads_seen`` are the threads that have called it."""

    name = "shelf"
    is_remote = True
    threads = 2

    def __init__(self) -> None:
        super().__init__(None)
        self.entries: dict[bytes, CachedResponse] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.full: BaseException | None = None
        self.calls = 0
        self.closed = False
        self.threads_seen: set[threading.Thread] = set()

    def get(self, key: bytes) -> CachedResponse | None:
        self.calls += 1
        self.threads_seen.add(threading.current_thread())
        assert self.gate.wait(90)
        if self.error is not None:
            raise self.error
        return self.entries.get(key)

    def put(self, key: bytes, response: CachedResponse) -> None:
        self.threads_seen.add(threading.current_thread())
        if (error := self.error or self.full) is not None:
            raise error
        self.entries[key] = response

    def close(self) -> None:
        self.closed = True


@staged
async def test_a_remote_cache_is_called_on_threads_once_for_equal_requests() -> None:
    shelf = Shelf()
    stage = CachedStage(cache=shelf)
    for name in "abc":
        stage.send(name)
    assert (stage.model_queue.pending, stage.model_queue.in_flight) == (0, 3)
    await until(lambda: stage.model_queue.pending)
    assert shelf.calls == 1
    assert await stage.execute() == ["a"]
    assert stage.y("b") == stage.y("c") == [2.0] * 4
    await until(lambda: shelf.entries)
    stage.send("d")
    stage.send("e")
    await until(lambda: stage.answers["e"])
    assert (stage.y("d"), stage.y("e")) == ([2.0] * 4, [2.0] * 4)
    assert shelf.calls == 2
    assert stage.counts() == (4, 1)
    assert threading.current_thread() not in shelf.threads_seen
    stage.server.close()
    assert shelf.closed


@staged
async def test_a_request_cancelled_during_the_look_up_is_not_executed() -> None:
    shelf = Shelf()
    shelf.gate.clear()
    stage = CachedStage(cache=shelf)
    for name in "ab":
        stage.send(name)
    stage.tickets["a"].cancel()
    assert isinstance(stage.answers["a"][0], Cancelled)
    shelf.gate.set()
    await until(lambda: stage.model_queue.pending)
    assert await stage.execute() == ["b"]
    stage.send("c", 2.0)
    stage.tickets["c"].cancel()
    await until(lambda: shelf.calls == 2 and not stage.model_queue._flights)
    assert stage.model_queue.in_flight == 0
    stage.server.close()


@pytest.mark.parametrize(
    "wrong",
    [
        CachedResponse({"y": Y.astype(np.int32)}, {}),
        CachedResponse({"y": Y.ravel()}, {}),
        CachedResponse({"x": Y}, {}),
        CachedResponse({"y": np.float32(1).reshape(())}, {}),
        CachedResponse({"y": Y}, {"p": 1 << 64}),
        CachedResponse({"y": Y}, {"p": "\ud800"}),
    ],
    ids=["data type", "shape", "name", "rank", "2^64", "surrogate"],
)
def test_entry_that_the_model_cannot_return_is_ignored(wrong: CachedResponse) -> None:
    @staged
    async def scene() -> None:
        shelf = Shelf()
        stage = CachedStage(cache=shelf)
        stage.send("a")
        await until(lambda: stage.model_queue.pending)
        await stage.execute()
        await until(lambda: shelf.entries)
        for key in shelf.entries:
            shelf.entries[key] = wrong
        stage.send("b")
        await until(lambda: stage.model_queue.pending)
        assert await stage.execute() == ["b"]
        assert stage.statistics.cache_failures == 1
        stage.server.close()

    scene()


def test_a_slow_cache_delays_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_calls, "TIMEOUT_S", 0.01)

    @staged
    async def scene() -> None:
        shelf = Shelf()
        shelf.gate.clear()
        stage = CachedStage(cache=shelf)
        stage.send("a")
        await until(lambda: stage.model_queue.pending)
        assert await stage.execute() == ["a"]
        assert stage.statistics.cache_failures == 1
        stage.send("b", 3.0)  # the cache is paused, so no request waits for it
        assert stage.model_queue.pending == 1
        assert await stage.execute() == ["b"]
        shelf.gate.set()
        await until(lambda: not stage.server.remote._getting)  # type: ignore[union-attr]
        assert shelf.calls == 1
        assert len(stage.answers["a"]) == 1  # its late result is dropped
        stage.server.close()

    scene()


@pytest.mark.parametrize("error", [ConnectionError("gone"), SystemExit(3)], ids=["error", "exit"])
def test_a_dead_cache_costs_one_log_line_and_is_used_again_later(
    error: BaseException, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_calls, "RETRY_S", 0.0)

    @staged
    async def scene() -> None:
        shelf = Shelf()
        stage = CachedStage(cache=shelf)
        shelf.error = error
        for number in range(3):
            stage.send(str(number), float(number))
            await until(lambda: stage.model_queue.pending)
            assert await stage.execute() == [str(number)]
        await until(lambda: stage.statistics.cache_failures == 3)
        shelf.error = None
        stage.send("a", 9.0)
        await until(lambda: stage.model_queue.pending)
        await stage.execute()
        await until(lambda: shelf.entries)
        stage.send("b", 9.0)
        await until(lambda: stage.answers["b"])
        assert stage.y("b") == [18.0] * 4
        stage.server.close()

    with caplog.at_level("INFO"):
        scene()
    lines = [record.getMessage() for record in caplog.records]
    shown = f"{type(error).__name__}: {error}"
    assert lines == [
        f"response cache 'shelf' failed, so models answer: {shown}",
        "response cache 'shelf' answers again",
    ]


def test_a_full_cache_still_answers_and_costs_one_log_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_calls, "RETRY_S", 0.0)

    @staged
    async def scene() -> None:
        shelf = Shelf()
        stage = CachedStage(cache=shelf)
        stage.send("kept", 5.0)
        await until(lambda: stage.model_queue.pending)
        await stage.execute()
        await until(lambda: shelf.entries)
        shelf.full = ValueError("full")
        for number in range(3):
            stage.send(str(number), float(number))
            await until(lambda: stage.model_queue.pending)
            await stage.execute()
            await until(lambda: stage.statistics.cache_failures > 0)
            stage.statistics.cache_failures = 0
            again = f"again {number}"
            stage.send(again, 5.0)
            await until(lambda: not stage.model_queue.in_flight)
            assert stage.y(again) == [10.0] * 4
        shelf.full = None
        stage.send("a", 9.0)
        await until(lambda: stage.model_queue.pending)
        await stage.execute()
        await until(lambda: len(shelf.entries) == 2)
        await until(lambda: caplog.records[-1].levelname == "INFO")
        stage.server.close()

    with caplog.at_level("INFO"):
        scene()
    assert [record.getMessage() for record in caplog.records] == [
        "response cache 'shelf' stores no further responses: ValueError: full",
        "response cache 'shelf' stores responses again",
    ]


def test_a_cache_that_hangs_delays_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_calls, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(remote_calls, "RETRY_S", 0.0)

    @staged
    async def scene() -> None:
        shelf = Shelf()
        shelf.gate.clear()
        stage = CachedStage(cache=shelf)
        stage.send("a")
        await until(lambda: stage.model_queue.pending)
        assert await stage.execute() == ["a"]
        for number in range(3):
            stage.send(str(number), float(number + 3))
            assert stage.model_queue.pending == 1, "it is asked, though it has not answered the first"
            await stage.execute()
        remote_calls.TIMEOUT_S = 90.0
        shelf.gate.set()
        await until(lambda: not stage.server.remote._getting)  # type: ignore[union-attr]
        assert shelf.calls == 1
        stage.send("b", 9.0)
        assert stage.model_queue.pending == 0
        await until(lambda: stage.model_queue.pending)
        assert shelf.calls == 2
        stage.server.close()

    scene()


def test_no_more_than_a_few_wait_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_calls, "WAITING", 3)

    @staged
    async def scene() -> None:
        shelf = Shelf()
        shelf.gate.clear()
        stage = CachedStage(cache=shelf)
        for number in range(5):
            stage.send(str(number), float(number))
        assert stage.model_queue.pending == 2
        shelf.gate.set()
        await until(lambda: stage.model_queue.pending == 5)
        stage.server.close()

    scene()


@staged
async def test_a_remote_cache_is_asked_in_turn_where_answers_keep_their_order() -> None:

    shelf = Shelf()
    stage = CachedStage("dynamic_batching { preserve_ordering: true }", shelf, DynamicScheduler)
    shelf.gate.clear()
    stage.send("first")
    stage.send("second", 2.0, parameters={"bypass_response_cache": True})
    assert await stage.execute() == ["second"]
    assert stage.answers["second"] == []
    shelf.gate.set()
    await until(lambda: stage.model_queue.pending)
    assert await stage.execute() == ["first"]
    assert stage.y("second") == [4.0] * 4
    stage.server.close()
