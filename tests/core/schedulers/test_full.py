"""A policy is three methods; what else a scheduler may have is a `FullScheduler`'s."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import Unavailable
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import (
    FullScheduler,
    InstanceInfo,
    ScheduledModel,
    Scheduler,
    SchedulerContext,
    with_defaults,
)
from headrace.schedulers.model_queue import ModelQueue
from headrace.telemetry.statistics import ModelStatistics
from tests.core.conftest import make_ticket


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")} | {
        name for name in kind.__annotations__ if not name.startswith("_")
    }


class Policy(Scheduler):
    """Takes in requests with a deadline that is over at once."""

    name = "policy"

    def submit(self, ticket: Ticket) -> int | None:
        ticket.deadline_ns = ticket.queued_ns + 1
        return None

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket]:
        return ()


def test_a_policy_is_three_methods_and_four_declarations() -> None:
    assert public(Scheduler) == {
        "name", "Parameters", "on_threads", "instances_alike", "is_stateful", "submit", "next", "finished",
    }  # fmt: skip


def test_the_queue_has_defaults_for_members_that_a_policy_lacks() -> None:
    """Among them that a request is rejected when its time is over, and that no request continues anything."""
    got: list[Any] = []

    async def scene() -> None:
        statistics = ModelStatistics()
        model_queue = ModelQueue(Policy, ScheduledModel(ModelConfig(name="m")), statistics, asyncio.get_running_loop())
        finished = asyncio.Event()

        def respond(answer: Any, final: bool) -> None:
            got.append(answer)
            finished.set()

        model_queue.submit(make_ticket("m", {}, respond))
        await asyncio.wait_for(finished.wait(), 60)
        await model_queue.drain()
        with pytest.raises(Unavailable, match="Server is stopping"):
            model_queue.submit(make_ticket("m", {}, respond))
        model_queue.close()
        assert statistics.snapshot().rejected.count == 1

    asyncio.run(scene())
    assert [str(answer) for answer in got] == ["Request timeout expired"]


@pytest.mark.parametrize("name", sorted(public(FullScheduler) - {"name", "next"}))
def test_members_of_a_full_scheduler_are_refused_in_any_other(name: str) -> None:
    with pytest.raises(TypeError, match=f"scheduler class Careless has {name}, which only a FullScheduler may have"):
        type("Careless", (Policy,), {name: None})
    assert issubclass(type("Full", (FullScheduler,), {name: None}), FullScheduler)


def test_attribute_of_a_policy_that_core_never_reads_is_refused() -> None:
    class Careless(Policy):
        def __init__(self, context: SchedulerContext) -> None:
            super().__init__(context)
            self.keeps_order = True

    context: Any = None
    with pytest.raises(TypeError, match="scheduler class Careless has keeps_order"):
        with_defaults(Careless(context))
