"""Random actions of callers, compared with an independent simulation by lists, without events or timers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Cancelled, HeadraceError, InferResponse, InvalidArgument
from headrace_sequence import SequenceScheduler
from headrace_testing.simulator import run_scenario

from .conftest import SequenceSimulator

IDLE_NS = 1_000_000
ROWS = 2


@dataclass(eq=False)
class Simulated:
    """A sequence: the numbers of its requests that wait and run."""

    name: int
    waits: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)
    touched: int = 0
    ready_at: int = 0


class Simulation:
    """The expected result: the sequences in the ``slots`` of instances, and the ``batches`` of request numbers."""

    def __init__(self, instances: int, slots: int, oldest: bool) -> None:
        self.oldest, self.now, self.turn = oldest, 0, 0
        self.slots: list[list[Simulated | None]] = [[None] * slots for _ in range(instances)]
        self.freed = {(slot, instance): instance - 1000 for instance in range(instances) for slot in range(slots)}
        self.backlog: list[Simulated] = []
        self.live: dict[int, Simulated] = {}
        self.all: list[Simulated] = []
        self.batches: list[list[int | None]] = [[] for _ in range(instances)]
        self.cancelled: set[int] = set()
        #: True if several sequences have ended at one instant: the backlog may get any of their slots.
        self.is_tied = False

    def ask(self, number: int, name: int, start: bool, end: bool) -> bool:
        found = self.live.get(name)
        if found is None:
            if not start:
                return False
            found = self.live[name] = Simulated(name)
            self.all.append(found)
            self._seat(found)
        found.waits.append(number)
        found.touched = self.now
        if len(found.waits) == 1:
            self._ready(found)
        if end:
            found.ends.add(number)
            del self.live[name]
        return True

    def cancel(self, number: int) -> None:
        for found in self.all:
            if number in found.waits:
                self._end(found)

    def cancel_running(self, number: int) -> None:
        """Cancel a running request."""
        self.cancelled.add(number)

    def finish(self, instance: int) -> None:
        batch, self.batches[instance] = self.batches[instance], []
        for number in batch:
            for found in self.all:
                if number in found.runs:
                    found.runs.remove(number)
                    found.touched = self.now
                    if found.waits:
                        self._ready(found)
                    if number in self.cancelled:
                        self._end(found)

    def expire(self) -> None:
        idle = [found for found in self.live.values() if not (found.waits or found.runs)]
        idle = [found for found in idle if self.now - found.touched >= IDLE_NS]
        self.is_tied = self.is_tied or (len(idle) > 1 and bool(self.backlog))
        for found in idle:
            self._end(found)

    def form(self) -> None:
        for instance, slots in enumerate(self.slots):
            if self.batches[instance]:
                continue
            ready = [found for found in slots if found is not None and found.waits]
            if self.oldest:
                ready = sorted((one for one in ready if not one.runs), key=lambda one: one.ready_at)[:ROWS]
                batch: list[int | None] = [one.waits[0] for one in ready]
            else:
                last = max((place for place, found in enumerate(slots) if found in ready), default=-1)
                batch = [one.waits[0] if one is not None and one.waits else None for one in slots[: last + 1]]
            for one in ready:
                number = one.waits.pop(0)
                one.runs.append(number)
                if number in one.ends:
                    self._release(one)
                elif one.waits:
                    self._ready(one)
            self.batches[instance] = batch

    def _ready(self, found: Simulated) -> None:
        self.turn += 1
        found.ready_at = self.turn

    def _seat(self, found: Simulated) -> None:
        if not self.freed:
            self.backlog.append(found)
            return
        slot, instance = min(self.freed, key=lambda one: (one[0], self.freed[one]))
        del self.freed[slot, instance]
        self.slots[instance][slot] = found

    def _release(self, found: Simulated) -> None:
        if found in self.backlog:
            self.backlog.remove(found)
        for instance, slots in enumerate(self.slots):
            for slot, one in enumerate(slots):
                if one is found:
                    slots[slot] = self.backlog.pop(0) if self.backlog else None
                    if (heir := slots[slot]) is not None:
                        self._ready(heir)
                    else:
                        self.turn += 1
                        self.freed[slot, instance] = self.turn

    def _end(self, found: Simulated) -> None:
        found.waits.clear()
        if self.live.get(found.name) is found:
            del self.live[found.name]
        self._release(found)


NAMES = st.integers(1, 6)
FLAGS = st.sampled_from(["", "S", "S", "S", "E", "SE"])
DONE = st.one_of(
    st.tuples(st.just("ask"), NAMES, FLAGS),
    st.tuples(st.just("ask"), NAMES, FLAGS),
    st.tuples(st.just("finish"), st.integers(0, 1), st.just("")),
    st.tuples(st.just("finish"), st.integers(0, 1), st.just("")),
    st.tuples(st.just("cancel"), st.integers(0, 40), st.just("")),
    st.tuples(st.just("turn"), st.integers(1, 1_200), st.just("")),
)


@pytest.mark.parametrize("oldest", [False, True])
@given(done=st.lists(DONE, min_size=10, max_size=60), instances=st.integers(1, 2))
@settings(max_examples=150)
def test_the_batches_equal_those_of_the_reference(
    oldest: bool, done: list[tuple[str, int, str]], instances: int
) -> None:
    run_scenario(partial(compared, oldest, done, instances))


async def compared(oldest: bool, done: list[tuple[str, int, str]], instances: int) -> None:
    slots = 3 if oldest else ROWS
    strategy = f"oldest {{ max_candidate_sequences: {slots} }}" if oldest else "direct { }"
    simulator = SequenceSimulator(f"{strategy} max_sequence_idle_microseconds: {IDLE_NS // 1000}", ROWS, instances)
    simulation = Simulation(instances, slots, oldest)
    numbers: dict[str, int] = {}

    async def same() -> None:
        await simulator.settle()
        if simulation.is_tied:
            return
        simulation.form()
        for played, batch in zip(simulator.instances, simulation.batches, strict=True):
            assert [
                numbers.get(ticket.request.id) if ticket in simulator.names else None for ticket in played.batch
            ] == batch
        scheduler = simulator.model_queue.scheduler
        assert isinstance(scheduler, SequenceScheduler)
        assert scheduler.backlogged == len(simulation.backlog)
        assert scheduler.active == sum(one is not None for slots in simulation.slots for one in slots)

    async def turn(by_ns: int) -> None:
        """Fire one timer at a time, because instances are not polled in the order of their numbers."""
        end_ns = simulator.clock.now_ns() + by_ns
        while (due_ns := simulator.clock.next_ns) is not None and due_ns <= end_ns:
            step(due_ns - simulator.clock.now_ns())
            await same()
        step(end_ns - simulator.clock.now_ns())
        await same()

    def step(by_ns: int) -> None:
        simulator.clock.advance(by_ns)
        simulation.now += by_ns
        simulation.expire()

    for what, which, flags in done:
        if simulation.is_tied:
            break
        if what == "ask":
            taken = simulation.ask(len(simulator.tickets), which, "S" in flags, "E" in flags)
            try:
                (ticket,) = simulator.send_words(f"{which}{flags}")
                numbers[ticket.request.id] = int(ticket.request.id)
            except InvalidArgument:
                simulator.violations.clear()
                simulator.answers[str(len(simulator.tickets) - 1)].append(None)
                assert not taken
            else:
                assert taken
        elif what == "finish" and which < instances and simulator.instances[which].batch:
            await turn(1)  # no two things happen at the same time
            simulation.finish(which)
            simulator.instances[which].finish()
        elif what == "cancel" and which < len(simulator.tickets) and not simulator.answers_to(simulator.tickets[which]):
            is_waiting = simulator.model_queue.has_waiting(simulator.tickets[which])
            (simulation.cancel if is_waiting else simulation.cancel_running)(which)
            simulator.tickets[which].cancel()
        elif what == "turn":
            await turn(1000 * which)
        await same()
    await everybody_is_answered(simulator)


async def everybody_is_answered(simulator: SequenceSimulator) -> None:
    """Once, in order, and by an answer or because one of the sequence has left."""
    while simulator.model_queue.in_flight:
        await simulator.settle()
        for instance in simulator.instances:
            if instance.batch:
                instance.finish()
        await simulator.advance(IDLE_NS)
    simulator.check()
    assert simulator.model_queue.pending == 0
    await simulator.advance(IDLE_NS)
    await simulator.advance(IDLE_NS)
    assert simulator.clock.pending == 0
    for ticket, word in simulator.names.items():
        (answer,) = simulator.answers_to(ticket)
        assert isinstance(answer, InferResponse | Cancelled), (word, answer)
        assert not isinstance(answer, HeadraceError) or isinstance(answer, Cancelled)
    ran = [ticket for instance in simulator.instances for ticket in instance.received if ticket in simulator.names]
    assert len(set(ran)) == len(ran)
