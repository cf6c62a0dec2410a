"""Levels and queue policies against a simulation that is written from docs/spec/behaviours.md section 6.3: who runs
next, who is refused, and when, on a clock that stands still."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import Cancelled, Unavailable
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace.schedulers.dynamic import DynamicScheduler
from headrace_testing.simulator import SchedulerSimulator

MS = 1_000_000
LEVELS, DEFAULT = 3, 2


@dataclass
class Policy:
    """The queue policy of one level; times in milliseconds."""

    timeout: int
    overrides: bool
    size: int
    delays: bool

    def text(self) -> str:
        action = "DELAY" if self.delays else "REJECT"
        return (
            f"timeout_action: {action} default_timeout_microseconds: {self.timeout * 1000} max_queue_size: {self.size} "
            f"allow_timeout_override: {str(self.overrides).lower()}"
        )


@dataclass
class Simulated:
    """One instance and its waiting requests. ``outcomes`` has the end of each request and its millisecond."""

    policies: dict[int, Policy]
    now: int = 0
    #: Per level the waiting requests, then the postponed ones: name and deadline (None for none).
    waiting: dict[int, list[list[tuple[int, int | None]]]] = field(default_factory=dict)
    running: int | None = None
    outcomes: dict[int, tuple[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = {level: [[], []] for level in range(1, LEVELS + 1)}

    def send(self, name: int, priority: int, timeout: int) -> None:
        level = priority if 1 <= priority <= LEVELS else DEFAULT
        policy = self.policies[level]
        if policy.size and sum(map(len, self.waiting[level])) >= policy.size:
            self.outcomes[name] = "full", self.now
            return
        limit = policy.timeout
        if policy.overrides and 0 < timeout < limit:
            limit = timeout
        self.waiting[level][0].append((name, self.now + limit if limit else None))

    def take(self) -> None:
        if self.running is None:
            for lanes in self.waiting.values():
                for lane in lanes:
                    if lane:
                        self.running = lane.pop(0)[0]
                        return

    def finish(self) -> None:
        if self.running is not None:
            self.outcomes[self.running] = "ran", self.now
            self.running = None

    def cancel(self, name: int) -> None:
        for lanes in self.waiting.values():
            for lane in lanes:
                for each in list(lane):
                    if each[0] == name:
                        lane.remove(each)
                        self.outcomes[name] = "cancelled", self.now

    def pass_ms(self) -> None:
        self.now += 1
        for level, (fresh, postponed) in self.waiting.items():
            for each in [each for each in fresh if each[1] == self.now]:
                fresh.remove(each)
                if self.policies[level].delays:
                    postponed.append((each[0], None))
                else:
                    self.outcomes[each[0]] = "expired", self.now


POLICIES = st.builds(Policy, st.integers(0, 6), st.booleans(), st.integers(0, 3), st.booleans())
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, LEVELS + 1), st.integers(0, 8)),
        st.tuples(st.just("pass"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("finish"), st.just(0), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
    ),
    max_size=40,
)


@given(default=POLICIES, own=st.dictionaries(st.integers(1, LEVELS), POLICIES), steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_execution_and_refusal_times_follow_the_specification(
    default: Policy, own: dict[int, Policy], steps: list[tuple[str, int, int]]
) -> None:
    asyncio.run(asyncio.wait_for(play(default, own, steps), 90))


async def play(default: Policy, own: dict[int, Policy], steps: list[tuple[str, int, int]]) -> None:
    levels = "".join(f"priority_queue_policy {{ key: {n} value {{ {each.text()} }} }} " for n, each in own.items())
    config = text_format.Parse(
        f'name: "m" max_batch_size: 1 dynamic_batching {{ priority_levels: {LEVELS} default_priority_level: {DEFAULT} '
        f"default_queue_policy {{ {default.text()} }} {levels} }}",
        ModelConfig(),
    )
    simulator = SchedulerSimulator(DynamicScheduler, config, 1)
    simulated = Simulated({level: own.get(level, default) for level in range(1, LEVELS + 1)})
    sent: dict[int, Ticket | None] = {}
    simulator.poll_instances()
    for what, number, timeout in steps:
        if what == "send":
            name = len(sent)
            simulated.send(name, number, timeout)
            try:
                sent[name] = simulator.send(priority=number, timeout_us=timeout * 1000)
            except Unavailable:
                sent[name] = None
        elif what == "pass":
            for _ in range(number):
                simulated.pass_ms()
                await simulator.advance(MS)
                simulated.take()
                compare(simulator, simulated, sent)
        elif what == "finish" and simulator.instances[0].batch:
            simulator.instances[0].finish()
            simulated.finish()
        elif what == "cancel" and (ticket := sent.get(number)) is not None:
            ticket.cancel()
            simulated.cancel(number)
        simulated.take()
        await simulator.settle()
        compare(simulator, simulated, sent)
    simulator.check()


def compare(simulator: SchedulerSimulator, simulated: Simulated, sent: dict[int, Any]) -> None:
    running = [ticket.request.id for ticket in simulator.instances[0].batch]
    names = {ticket.request.id: name for name, ticket in sent.items() if ticket is not None}
    assert [names[each] for each in running] == ([] if simulated.running is None else [simulated.running])
    for name, ticket in sent.items():
        if ticket is None:
            assert simulated.outcomes[name][0] == "full"
            continue
        answers = simulator.answers_to(ticket)
        if name not in simulated.outcomes:
            assert answers == []
            continue
        (answer,) = answers
        kind = {"ran": InferResponse, "cancelled": Cancelled, "expired": Unavailable}[simulated.outcomes[name][0]]
        assert type(answer) is kind
