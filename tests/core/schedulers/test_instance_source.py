"""When an instance that sleeps is woken: whenever what waits has become a batch, and by nothing it could miss.

Each scenario is played to an instance with a thread of its own, to one whose batches the event loop runs while that
thread sleeps, and to one that lives on the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic_ns
from typing import Any

import pytest
from google.protobuf import text_format

from headrace.backends.base import Device
from headrace.config.model_config_pb2 import ModelConfig
from headrace.executors.threads import LoopWakeup, Wakeup
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import Clock, InstanceInfo, LoopClock, ScheduledModel
from headrace.schedulers.dynamic import DirectScheduler, DynamicScheduler
from headrace.schedulers.instance_source import TURN_NS, InstanceSource
from headrace.schedulers.model_queue import ModelQueue
from headrace.telemetry.statistics import ModelStatistics
from headrace_testing.simulated_parts import ManualClock
from tests.core.conftest import make_ticket

LONG = "max_queue_delay_microseconds: 60000000"
LATE = "allow_timeout_override: true default_timeout_microseconds: 60000000"


class Played:
    """A scheduler, its one instance, and what that has run. Time stands still until ``clock`` is turned, unless it is
    given another."""

    def __init__(
        self, text: str, kind: type[DynamicScheduler], max_batch_size: int, real_clock: Clock | None = None
    ) -> None:
        self.batches: asyncio.Queue[list[str]] = asyncio.Queue()
        self.clock = ManualClock()
        self.expired: list[str] = []
        self.loop, self.thread = asyncio.get_running_loop(), threading.current_thread()
        config = ModelConfig(name="m", max_batch_size=max_batch_size)
        text_format.Parse(f"dynamic_batching {{ {text} }}", config)
        model = ScheduledModel(config, [InstanceInfo("m_0", Device("cpu"), max_batch_size)])
        self.scheduler = ModelQueue(kind, model, ModelStatistics(), self.loop, real_clock or self.clock)
        (self.source,) = self.scheduler.sources

    def send(self, name: str, rows: int = 1, key: object = None, timeout_us: int = 0, priority: int = 0) -> Ticket:
        def respond(answer: Answer, final: bool) -> None:
            if not isinstance(answer, InferResponse):
                self.expired.append(name)

        ticket = make_ticket("m", {}, respond, id=name, rows=rows, timeout_us=timeout_us, priority=priority)
        ticket.batch_key = key
        self.scheduler.submit(ticket)
        return ticket

    def run(self, batch: list[Ticket]) -> int:
        assert threading.current_thread() is self.thread
        self.scheduler.deliver(batch, [InferResponse({})] * len(batch))
        self.batches.put_nowait([ticket.request.id for ticket in batch])
        return monotonic_ns()

    async def next(self) -> list[str]:
        """The next batch that the instance has run."""
        return await asyncio.wait_for(self.batches.get(), 10)

    async def settle(self) -> None:
        """Wait until the instance has polled the new requests, and sleeps again."""
        while not self.scheduler.idle or self.scheduler._is_waking:
            await asyncio.sleep(0)

    def serve_on_thread(self, runs_on_loop: bool = False) -> threading.Thread:
        def work() -> None:
            wakeup = Wakeup()
            if runs_on_loop:
                self.source.run_on_loop(self.run)
            while (batch := self.source.take(wakeup)) is not None:
                self.loop.call_soon_threadsafe(self.run, batch)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def serve_on_loop(self) -> None:
        def pull() -> None:
            if batch := self.source.poll(wakeup):
                self.run(batch)
                self.loop.call_soon(pull)

        wakeup = LoopWakeup(pull)
        pull()


@pytest.fixture(params=["thread", "thread that sleeps", "loop"])
def play(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Plays a scenario: ``play(scenario, text, kind=..., max_batch_size=...)``."""

    @asynccontextmanager
    async def played(text: str, kind: type[DynamicScheduler], max_batch_size: int) -> AsyncIterator[Played]:
        stage = Played(text, kind, max_batch_size)
        thread = None if request.param == "loop" else stage.serve_on_thread(request.param != "thread")
        if thread is None:
            stage.serve_on_loop()
        try:
            yield stage
        finally:
            stage.scheduler.close()
            if thread is not None:
                await asyncio.to_thread(thread.join)

    def play(
        scenario: Callable[[Played], Awaitable[None]],
        text: str,
        kind: type[DynamicScheduler] = DynamicScheduler,
        max_batch_size: int = 8,
    ) -> None:
        async def whole() -> None:
            async with played(text, kind, max_batch_size) as stage:
                await scenario(stage)

        asyncio.run(asyncio.wait_for(whole(), 30))

    return play


def test_a_request_of_another_shape_completes_the_batch_before_it(play: Callable[..., None]) -> None:
    async def scenario(stage: Played) -> None:
        for name in "ab":
            stage.send(name, key="short")
            await stage.settle()
        stage.send("c", key="long")
        assert await stage.next() == ["a", "b"]

    play(scenario, LONG)


def test_a_request_that_does_not_fit_completes_the_batch_before_it(play: Callable[..., None]) -> None:
    async def scenario(stage: Played) -> None:
        stage.send("a", rows=3)
        await stage.settle()
        stage.send("b", rows=4)
        assert await stage.next() == ["a"]
        await stage.settle()
        assert stage.batches.empty()  # four rows wait for the rest of the delay

    play(scenario, f"preferred_batch_size: [2, 6] {LONG}")


@pytest.mark.parametrize("leaves", ["expired", "cancelled", "postponed"])
def test_a_request_that_leaves_a_preferred_size_behind_completes_the_batch(
    play: Callable[..., None], leaves: str
) -> None:
    async def scenario(stage: Played) -> None:
        first = stage.send("a", rows=3, timeout_us=0 if leaves == "cancelled" else 500_000)
        for name in "bc":
            stage.send(name)
            await stage.settle()
        assert stage.batches.empty()
        if leaves == "cancelled":
            first.cancel()
        else:
            stage.clock.advance(500_000_000)
        assert await stage.next() == ["b", "c"]
        assert stage.expired == ([] if leaves == "postponed" else ["a"])

    action = "timeout_action: DELAY" if leaves == "postponed" else ""
    play(scenario, f"preferred_batch_size: [2, 8] {LONG} default_queue_policy {{ {action} {LATE} }}")


def test_a_request_of_a_higher_level_may_complete_a_batch_in_front_of_those_that_wait(
    play: Callable[..., None],
) -> None:
    async def scenario(stage: Played) -> None:
        for name, rows in (("a", 3), ("b", 5)):
            stage.send(name, rows)
            await stage.settle()
        stage.send("first", 4, priority=1)
        assert await stage.next() == ["first"]

    play(
        scenario,
        f"preferred_batch_size: [4, 16] {LONG} priority_levels: 2 default_priority_level: 2",
        max_batch_size=16,
    )


@pytest.mark.parametrize("kind", [DirectScheduler, DynamicScheduler])
def test_a_request_behind_an_expired_one_does_not_wait_for_its_deadline(kind: type[DynamicScheduler]) -> None:
    async def scenario(stage: Played) -> None:
        late, wakeup = stage.send("late", timeout_us=1), Wakeup()
        stage.send("valid")
        while monotonic_ns() <= late.deadline_ns:  # the loop is busy, so that no timer fires
            continue
        batch = stage.source.take(wakeup)
        assert batch is not None
        assert [ticket.request.id for ticket in batch] == ["valid"]
        stage.scheduler.deliver(batch, [InferResponse({})])
        while not stage.expired:
            await asyncio.sleep(0)
        assert stage.expired == ["late"]

    async def alone() -> None:
        loop_clock = LoopClock(asyncio.get_running_loop())
        await scenario(Played(f"default_queue_policy {{ {LATE} }}", kind, 1, loop_clock))

    asyncio.run(asyncio.wait_for(alone(), 20))


@pytest.mark.parametrize("stays", [0, 1, 3, 5])
def test_the_loop_runs_waiting_requests_until_the_instance_moves_off_it(stays: int) -> None:
    async def scenario() -> None:
        stage = Played("", DirectScheduler, 1)
        here: list[str] = []
        there: list[str] = []

        def run(batch: list[Ticket]) -> int:
            here.append(batch[0].request.id)
            if len(here) == stays:
                stage.source.run_on_loop(None)
            return stage.run(batch)

        def work() -> None:
            wakeup = Wakeup()
            if stays:
                stage.source.run_on_loop(run)
            while (batch := stage.source.take(wakeup)) is not None:
                there.append(batch[0].request.id)
                stage.loop.call_soon_threadsafe(stage.run, batch)

        for name in "abcde":
            stage.send(name)
        thread = threading.Thread(target=work)
        thread.start()
        for name in "abcde":
            assert await stage.next() == [name]
        stage.scheduler.close()
        await asyncio.to_thread(thread.join)
        assert (here, there) == (list("abcde")[:stays], list("abcde")[stays:])

    asyncio.run(asyncio.wait_for(scenario(), 90))


def test_the_loop_polls_its_sockets_after_batches_have_taken_their_share() -> None:
    async def scenario() -> None:
        stage, seen, ended_ns = Played("", DirectScheduler, 1), list[str](), 0

        def run(batch: list[Ticket]) -> int:
            nonlocal ended_ns
            seen.append(batch[0].request.id)
            stage.loop.call_soon(seen.append, "-")  # as the loop would poll a socket
            stage.run(batch)
            ended_ns += TURN_NS // 2
            return ended_ns

        def work() -> None:
            stage.source.run_on_loop(run)
            assert stage.source.take(Wakeup()) is None

        for name in "abcdefgh":
            stage.send(name)
        thread = threading.Thread(target=work)
        thread.start()
        for name in "abcdefgh":
            assert await stage.next() == [name]
        await asyncio.sleep(0)
        stage.scheduler.close()
        await asyncio.to_thread(thread.join)
        assert "".join(seen) == "abc---def---gh--"

    asyncio.run(asyncio.wait_for(scenario(), 90))


def test_an_instance_that_stops_polling_cancels_its_timer_and_another_takes_its_batch() -> None:
    """Else the timer of its forming batch would wake an executor that is down."""

    async def scenario() -> None:
        stage = Played(LONG, DynamicScheduler, 8)
        woken: list[bool] = []

        def pull() -> None:
            woken.append(True)
            stage.source.poll(wakeup)

        wakeup = LoopWakeup(pull)
        stage.send("a")
        pull()
        assert stage.clock.pending == 1  # of the batch that forms
        stage.source.stop_polling(wakeup)
        assert stage.clock.pending == 0
        assert stage.source not in stage.scheduler.idle
        woken.clear()
        stage.clock.advance(120_000_000_000)
        await asyncio.sleep(0)
        assert not woken
        stage.scheduler.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


class Noticing(Wakeup):
    """A wake-up that reports when its thread sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = threading.Semaphore(0)

    def wait(self) -> None:
        self.sleeps.release()
        super().wait()


@pytest.mark.parametrize("arrives", [True, False])
def test_a_request_that_arrives_while_a_thread_becomes_idle_is_not_missed(
    arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has found nothing, and is not yet among the idle ones."""

    async def scenario() -> None:
        stage = Played("", DirectScheduler, 8)
        find, calls = InstanceSource._next_batch, []

        def ask(source: InstanceSource) -> list[Ticket]:
            calls.append(True)
            batch = find(source)
            if arrives and len(calls) == 1:  # no instance is idle, so the arrival wakes none
                asyncio.run_coroutine_threadsafe(submit(), stage.loop).result(10)
            return batch

        async def submit() -> None:
            stage.send("a")

        monkeypatch.setattr(InstanceSource, "_next_batch", ask)
        wakeup, taken = Noticing(), list[Any]()
        thread = threading.Thread(target=lambda: taken.append(stage.source.take(wakeup)))
        thread.start()
        if arrives:
            await asyncio.to_thread(thread.join, 10)
            assert [ticket.request.id for ticket in taken[0]] == ["a"]
            assert len(calls) == 2
        else:
            assert await asyncio.to_thread(wakeup.sleeps.acquire, timeout=10)
            assert len(calls) == 1  # it sleeps, and does not poll repeatedly
            assert list(stage.scheduler.idle) == [stage.source]
        stage.scheduler.close()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
        if not arrives:
            assert taken == [None]

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_thread_that_becomes_idle_when_its_source_closes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stage = Played("", DirectScheduler, 8)
        find = InstanceSource._next_batch

        def ask(source: InstanceSource) -> list[Ticket]:
            asyncio.run_coroutine_threadsafe(close(), stage.loop).result(10)
            return find(source)

        async def close() -> None:
            stage.scheduler.close()

        monkeypatch.setattr(InstanceSource, "_next_batch", ask)
        taken: list[object] = []
        thread = threading.Thread(target=lambda: taken.append(stage.source.take(Wakeup())))
        thread.start()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
        assert taken == [None]
        assert not stage.scheduler.idle

    asyncio.run(asyncio.wait_for(scenario(), 30))
