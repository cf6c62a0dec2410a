"""Which idle instances the event loop wakes, when, and how often. The instances are played by the test.

`test_model_queue` and `test_instance_source` test the same code with real instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import pytest

from headrace.backends.base import Device
from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages import dtypes
from headrace.messages.response import Answer
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import FullScheduler, InstanceInfo, ScheduledModel, Scheduler, SchedulerContext, Wait
from headrace.schedulers.dispatcher import WAKES_ALL, Dispatcher
from tests.core.conftest import make_ticket

X = Spec("x", dtypes.FP32, (1,))


class Alike(Scheduler):
    name = "alike"
    instances_alike = True
    on_threads = True

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return []


class Different(Alike):
    instances_alike = False


class OnLoop(Alike):
    on_threads = False


class Keeps(FullScheduler):
    """Keeps an output that callers get as well, and one that they do not get."""

    name = "keeps"

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.kept = {"x": X, "state": X}

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return []


class Finishes(Alike):
    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        pass


class Played(Dispatcher):
    @property
    def in_flight(self) -> int:
        return 0

    def answer_for_scheduler(self, ticket: Ticket, answer: Answer, final: bool = True) -> None: ...

    def progress(self, ticket: Ticket, response: Answer) -> None: ...

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None: ...

    def finish_and_deliver(self, source: Any, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None: ...


class Source:
    """An instance that notes when it is offered work or woken, and takes the first ``takes`` offers."""

    def __init__(self, takes: int = 0, *, is_limited: bool = False, runs_on_loop: bool = False) -> None:
        self.wake_at = 0.0
        self.calls_at_once = 2
        self.is_limited, self.runs_on_loop = is_limited, runs_on_loop
        self.takes, self.offers, self.woken = takes, 0, 0

    def offer(self) -> bool:
        self.offers += 1
        self.takes -= 1
        return self.takes >= 0

    def wake(self) -> None:
        self.woken += 1


def made(kind: type[Scheduler], *sources: Source) -> Played:
    infos = [InstanceInfo(f"m_0_{number}", Device("cpu"), 4) for number, _ in enumerate(sources)]
    model = ScheduledModel(ModelConfig(name="m", max_batch_size=4), infos, {"x": X}, {"x": X})
    dispatcher = Played(kind, model, asyncio.get_running_loop())
    dispatcher.use_sources(sources)
    dispatcher.idle.extend(sources)
    return dispatcher


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 20))

    return run


@on_loop
async def test_many_changes_of_one_turn_wake_once() -> None:
    source = Source(takes=9)
    dispatcher = made(Alike, source)
    for _ in range(3):
        dispatcher.wake_soon()
    assert source.offers == 0
    await asyncio.sleep(0)
    assert source.offers == 1
    dispatcher.wake_soon()  # no instance is idle
    await asyncio.sleep(0)
    assert source.offers == 1
    dispatcher.idle.append(source)
    dispatcher.wake_soon()
    await asyncio.sleep(0)
    assert source.offers == 2


@on_loop
async def test_instances_alike_are_offered_work_until_one_takes_none() -> None:
    sources = [Source(takes=1), Source(), Source(takes=1)]
    dispatcher = made(Alike, *sources)
    dispatcher.wake_soon()
    await asyncio.sleep(0)
    assert [source.offers for source in sources] == [1, 1, 0]
    assert list(dispatcher.idle) == [sources[2]]


@pytest.mark.parametrize("is_limited", [False, True])
@on_loop
async def test_different_instances_are_all_offered_work(is_limited: bool) -> None:
    sources = [Source(takes=1, is_limited=is_limited), Source(), Source(takes=1)]
    dispatcher = made(Alike if is_limited else Different, *sources)
    dispatcher.wake_soon()
    await asyncio.sleep(0)
    assert [source.offers for source in sources] == [1, 1, 1]


@pytest.mark.parametrize(("kind", "offers"), [(Alike, [0, 0]), (Different, [0, 1])])
@on_loop
async def test_an_instance_that_waits_for_more_rows_is_left_alone(kind: type[Scheduler], offers: list[int]) -> None:
    waits, other = Source(takes=1), Source(takes=1)
    dispatcher = made(kind, waits, other)
    waits.wake_at = 4
    dispatcher.change_count = 3
    dispatcher.wake_soon()
    await asyncio.sleep(0)
    assert [waits.offers, other.offers] == offers
    dispatcher.change_count = 4
    dispatcher.wake_soon()
    await asyncio.sleep(0)
    assert waits.offers == 1


@on_loop
async def test_a_scheduler_that_notifies_wakes_waiting_instances_too() -> None:
    source = Source(takes=1)
    dispatcher = made(Different, source)
    source.wake_at = 1000
    dispatcher.ask_again()
    assert dispatcher.change_count == WAKES_ALL
    await asyncio.sleep(0)
    assert source.offers == 1


@pytest.mark.parametrize(
    ("kind", "source", "takes"),
    [
        (Alike, {}, True),
        (OnLoop, {}, False),
        (Different, {}, False),
        (Alike, {"is_limited": True}, False),
        (Alike, {"runs_on_loop": True}, False),
    ],
)
@on_loop
async def test_threads_take_batches_themselves_only_if_nothing_forbids_it(
    kind: type[Scheduler], source: dict[str, bool], takes: bool
) -> None:
    dispatcher = made(kind, Source(), Source(**source))
    assert dispatcher.threads_take is takes
    dispatcher.has_formed_batches = True
    dispatcher.update_takers()
    assert dispatcher.threads_take is False


@on_loop
async def test_a_thread_hands_on_the_requests_that_it_did_not_take() -> None:
    first, second = Source(), Source()
    dispatcher = made(Alike, first, second)
    dispatcher.hand_on()
    assert first.woken == 0  # nothing waits
    dispatcher.queue.add(make_ticket())
    dispatcher.hand_on()
    assert (first.woken, second.woken) == (1, 0)
    dispatcher.hand_on()
    dispatcher.hand_on()  # no instance is idle
    assert (first.woken, second.woken, len(dispatcher.idle)) == (1, 1, 0)
    dispatcher.threads_take = False
    dispatcher.idle.append(first)
    dispatcher.hand_on()
    assert first.woken == 1


@on_loop
async def test_executions_at_once_are_those_of_all_instances() -> None:
    assert made(Alike, Source(), Source(), Source()).at_once == 6


@on_loop
async def test_outputs_for_the_scheduler_only_are_hidden() -> None:
    dispatcher = made(Keeps, Source())
    assert dispatcher.kept == {"x", "state"}
    assert dispatcher.hidden == {"state"}
    assert dispatcher.calls_finished


@pytest.mark.parametrize(("kind", "calls"), [(Alike, False), (Finishes, True)])
@on_loop
async def test_results_are_shown_to_schedulers_that_read_them(kind: type[Scheduler], calls: bool) -> None:
    assert made(kind, Source()).calls_finished is calls
