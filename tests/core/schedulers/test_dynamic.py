"""The dynamic batcher on a real event loop, with the test in the place of an instance thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.base import Device
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import Cancelled, Code, HeadraceError, Unavailable
from headrace.executors.threads import Wakeup
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import InstanceInfo, ScheduledModel
from headrace.schedulers.dynamic import DirectScheduler, DynamicScheduler
from headrace.schedulers.instance_source import InstanceSource
from headrace.schedulers.model_queue import ModelQueue
from headrace.telemetry.statistics import ModelStatistics
from tests.core.conftest import make_ticket

Answer = InferResponse | HeadraceError | None


class Caller:
    """Sends requests and records the answers in the order of arrival."""

    def __init__(self, scheduler: ModelQueue) -> None:
        self.scheduler = scheduler
        self.source = scheduler.sources[0]
        self.answers: dict[str, list[Answer]] = {}

    def send(self, name: str, *, rows: int = 1, timeout_us: int = 0, priority: int = 0) -> Ticket:
        def respond(answer: Answer, final: bool) -> None:
            assert final
            self.answers.setdefault(name, []).append(answer)

        ticket = make_ticket("m", {}, respond, id=name, rows=rows, timeout_us=timeout_us, priority=priority)
        self.scheduler.submit(ticket)
        return ticket

    def error(self, name: str) -> HeadraceError:
        (answer,) = self.answers[name]
        assert isinstance(answer, HeadraceError)
        return answer


def make(text: str = "", *, max_batch_size: int = 8, kind: type[DynamicScheduler] = DynamicScheduler) -> Caller:
    config = ModelConfig(name="m", max_batch_size=max_batch_size)
    text_format.Parse(f"dynamic_batching {{ {text} }}", config)
    instances = [InstanceInfo(f"m_0_{number}", Device("cpu"), max_batch_size) for number in range(3)]
    return Caller(ModelQueue(kind, ScheduledModel(config, instances), ModelStatistics(), asyncio.get_running_loop()))


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__ = test.__name__
    return run


def take(caller: Caller) -> list[str]:
    batch = caller.source.take(Wakeup())
    assert batch is not None
    caller.scheduler.deliver(batch, [InferResponse({}, id=ticket.request.id) for ticket in batch])
    return [ticket.request.id for ticket in batch]


@on_loop
async def test_requests_that_wait_together_run_together() -> None:
    caller = make()
    for name in "abc":
        caller.send(name)
    assert take(caller) == ["a", "b", "c"]
    assert caller.scheduler.in_flight == 0


@on_loop
async def test_the_direct_scheduler_never_joins_requests() -> None:
    caller = make(kind=DirectScheduler)
    caller.send("a", rows=4)
    caller.send("b")
    assert [take(caller), take(caller)] == [["a"], ["b"]]


def test_cancelling_any_position_of_a_waiting_batch_leaves_the_others_answered() -> None:
    @on_loop
    async def scenario() -> None:
        for position in range(4):
            caller = make()
            tickets = [caller.send(str(index)) for index in range(4)]
            tickets[position].cancel()
            assert take(caller) == [str(index) for index in range(4) if index != position]
            assert isinstance(caller.error(str(position)), Cancelled)

    scenario()


@on_loop
async def test_cancelling_twice_or_after_the_answer_changes_nothing() -> None:
    caller = make()
    ticket = caller.send("a")
    assert take(caller) == ["a"]
    ticket.cancel()
    ticket.cancel()
    assert len(caller.answers["a"]) == 1


@on_loop
async def test_an_expired_request_is_answered_by_a_timer_while_no_instance_is_free() -> None:
    caller = make("default_queue_policy { default_timeout_microseconds: 1000 }")
    caller.send("a")
    while "a" not in caller.answers:
        await asyncio.sleep(0)
    assert caller.error("a").message.endswith("Request timeout expired")
    assert caller.error("a").code is Code.UNAVAILABLE
    assert caller.scheduler.pending == 0


@on_loop
async def test_a_delayed_request_is_served_after_the_unexpired_ones() -> None:
    policy = "timeout_action: DELAY default_timeout_microseconds: 1000000 allow_timeout_override: true"
    caller = make(f"default_queue_policy {{ {policy} }}")
    late = caller.send("late", timeout_us=1)
    while late.deadline_ns:
        await asyncio.sleep(0)
    caller.send("fresh")
    assert take(caller) == ["fresh", "late"]


@on_loop
async def test_a_full_queue_refuses_at_once_and_counts_the_rejection() -> None:
    caller = make("default_queue_policy { max_queue_size: 1 }")
    caller.send("a")
    with pytest.raises(Unavailable, match=r"^\[request id: b\] Exceeds maximum queue size$"):
        caller.send("b")
    assert caller.scheduler.statistics.rejected.count == 1
    assert take(caller) == ["a"]


@on_loop
async def test_priority_one_overtakes_the_default_level() -> None:
    caller = make("priority_levels: 2 default_priority_level: 2", max_batch_size=1)
    caller.send("a")
    caller.send("b", priority=1)
    assert [take(caller), take(caller)] == [["b"], ["a"]]


@pytest.mark.parametrize(("text", "may"), [("", True), ("preserve_ordering: true", False)])
def test_only_an_instance_without_preserved_order_answers_at_once(text: str, may: bool) -> None:
    async def scenario() -> None:
        caller = make(text)
        ticket = make_ticket(respond_at_once=lambda response: None)
        caller.scheduler.submit(ticket)
        assert (ticket.respond_at_once is not None) is may

    asyncio.run(scenario())


@on_loop
async def test_preserve_ordering_holds_answers_until_the_earlier_ones_are_given() -> None:
    caller = make("preserve_ordering: true", max_batch_size=1)
    for name in "ab":
        caller.send(name)
    scheduler = caller.scheduler
    first, second = (source.take(Wakeup()) for source in scheduler.sources[:2])
    assert first is not None
    assert second is not None
    scheduler.deliver(second, [InferResponse({})])
    assert not caller.answers
    scheduler.deliver(first, [InferResponse({})])
    assert list(caller.answers) == ["a", "b"]


@on_loop
async def test_draining_refuses_new_requests_and_waits_for_the_old() -> None:
    caller = make()
    caller.send("a")
    draining = asyncio.ensure_future(caller.scheduler.drain())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="Server is stopping, scheduler for model has stopped accepting"):
        caller.send("b")
    assert not draining.done()
    assert take(caller) == ["a"]
    await draining


@on_loop
async def test_closing_answers_waiting_requests_and_ends_the_instances() -> None:
    caller = make()
    caller.send("a")
    caller.scheduler.close()
    assert isinstance(caller.error("a"), Unavailable)
    assert caller.source.take(Wakeup()) is None


@pytest.mark.parametrize("text", ["", "preserve_ordering: true"])
def test_abandoning_answers_all_requests_and_drops_later_answers(text: str) -> None:
    @on_loop
    async def scenario() -> None:
        caller = make(text, max_batch_size=1)
        tickets = [caller.send(name) for name in "abcd"]
        scheduler = caller.scheduler
        first, second = (source.take(Wakeup()) for source in scheduler.sources[:2])
        assert first is not None
        assert second is not None
        scheduler.deliver(second, [InferResponse({}, id="b")])
        draining = asyncio.ensure_future(scheduler.drain())
        scheduler.abandon()
        scheduler.abandon()
        await draining
        assert caller.source.take(Wakeup()) is None
        assert [caller.error(name).message for name in "acd"] == [
            f"[request id: {name}] Server is stopping" for name in "acd"
        ]
        assert [caller.error(name).code for name in "acd"] == [Code.UNAVAILABLE] * 3
        assert [isinstance(answer, InferResponse) for answer in caller.answers["b"]] == [True]
        assert tickets[0].cancelled  # so that its execution may end
        scheduler.progress(tickets[0], InferResponse({}))
        scheduler.deliver(first, [InferResponse({})])
        assert len(caller.answers["a"]) == 1
        assert (scheduler.in_flight, scheduler.pending) == (0, 0)

    scenario()


@on_loop
async def test_a_frontend_that_fails_to_write_does_not_affect_the_rest_of_the_batch() -> None:
    caller = make()

    def fail(answer: Answer, final: bool) -> None:
        raise ConnectionError("gone")

    caller.scheduler.submit(make_ticket("m", {}, fail, id="bad"))
    caller.send("good")
    assert take(caller) == ["bad", "good"]
    assert len(caller.answers["good"]) == 1


def test_a_delayed_batch_is_completed_by_what_arrives_meanwhile() -> None:
    @on_loop
    async def scenario() -> None:
        caller = make("max_queue_delay_microseconds: 10000000", max_batch_size=3)
        taken: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        wakeup = Wakeup()

        def instance() -> None:
            batch = caller.source.take(wakeup)
            assert batch is not None
            loop.call_soon_threadsafe(taken.set_result, [ticket.request.id for ticket in batch])

        thread = threading.Thread(target=instance)
        thread.start()
        for name in "abc":
            caller.send(name)
            await asyncio.sleep(0)
        assert await taken == ["a", "b", "c"]
        thread.join()

    scenario()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 3),
    st.sampled_from(
        [
            "",
            "max_queue_delay_microseconds: 300",
            "preserve_ordering: true",
            "preferred_batch_size: [2, 4] max_queue_delay_microseconds: 300 "
            "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 200 }",
        ]
    ),
)
def test_any_interleaving_answers_every_request_exactly_once_with_its_own(
    plan: list[tuple[int, bool, bool]], instances: int, text: str
) -> None:
    @on_loop
    async def scenario() -> None:
        caller = make(text, max_batch_size=4)
        scheduler, loop = caller.scheduler, asyncio.get_running_loop()

        def instance(source: InstanceSource) -> None:
            wakeup = Wakeup()
            while (batch := source.take(wakeup)) is not None:
                assert sum(ticket.rows for ticket in batch) <= 4
                loop.call_soon_threadsafe(scheduler.deliver, batch, [InferResponse({}, id=t.request.id) for t in batch])

        threads = [threading.Thread(target=instance, args=[source]) for source in scheduler.sources[:instances]]
        for thread in threads:
            thread.start()
        for index, (rows, cancels, yields) in enumerate(plan):
            ticket = caller.send(str(index), rows=rows)
            if yields:
                await asyncio.sleep(0)
            if cancels:
                ticket.cancel()
        await scheduler.drain()
        scheduler.close()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
        assert len(caller.answers) == len(plan)
        for name, answers in caller.answers.items():
            (answer,) = answers
            assert isinstance(answer, Cancelled) or (isinstance(answer, InferResponse) and answer.id == name)

    scenario()
