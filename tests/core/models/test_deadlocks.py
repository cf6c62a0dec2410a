"""The search for deadlocks, on a clock of the test's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import process_time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.ticket import Padding, Ticket
from headrace.models.deadlocks import SCANS, SCANS_PER_SWEEP, DeadlockDetector
from tests.core.conftest import make_ticket


class Clock:
    """The part of an event loop that is needed: due calls run when the test advances it."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, delay: float, call: Callable[[], None]) -> object:
        self.due.append(call)
        return call

    def look(self) -> None:
        due, self.due = self.due, []
        for call in due:
            call()


@dataclass(eq=False)
class Executor:
    alive: bool = True
    executing: Sequence[Ticket] = ()


@dataclass(eq=False)
class Model:
    name: str
    executors: list[Executor] = field(default_factory=list)
    waiting: set[Ticket] = field(default_factory=set)

    def has_waiting(self, ticket: Ticket) -> bool:
        return ticket in self.waiting


class Scene:
    """Models with their executors. The test executes and sends the requests."""

    def __init__(self, *names: str) -> None:
        self.clock = Clock()
        self.refused: list[tuple[Ticket, str]] = []
        self.deadlocks = DeadlockDetector(self.clock, self._refuse)  # type: ignore[arg-type]
        self.models = {name: Model(name, [Executor()]) for name in names}
        self.sent: dict[Ticket, Executor | None] = {}

    def begin(self, model: str, executor: int = 0) -> Ticket:
        """A client's request, and all instances but ``executor`` free."""
        ticket = make_ticket(model)
        self.models[model].executors[executor].executing = [ticket]
        return ticket

    def call(
        self, caller: Ticket, target: str, executor: int = 0, is_known: bool = True, awaiting: Sequence[Ticket] = ()
    ) -> Ticket:
        """A call that waits in the queue of ``target``."""
        asking = caller.request
        source = self.models[asking.model_name]
        known = asking if is_known else None
        ticket = make_ticket(target, callers=(*asking.callers, source.name), caller=known)
        self.models[target].waiting.add(ticket)
        self.sent[ticket] = source.executors[executor]
        self.deadlocks.add(source.executors[executor], ticket, self.models[target], awaiting)  # type: ignore[arg-type]
        return ticket

    def ask(self, asker: Ticket, target: str) -> Ticket:
        """A request of a scheduler, whose model has no instances, that waits in the queue of ``target``."""
        asking = asker.request
        ticket = make_ticket(target, callers=(*asking.callers, asking.model_name), caller=asking)
        self.models[target].waiting.add(ticket)
        self.sent[ticket] = None
        self.deadlocks.add(None, ticket, self.models[target])  # type: ignore[arg-type]
        return ticket

    def answer(self, ticket: Ticket) -> None:
        self.models[ticket.request.model_name].waiting.discard(ticket)
        self.deadlocks.discard(self.sent[ticket], ticket)  # type: ignore[arg-type]

    def look(self, times: int = 1) -> list[str]:
        for _ in range(times):
            self.clock.look()
        return [path for _, path in self.refused]

    def _refuse(self, ticket: Ticket, path: Sequence[str]) -> None:
        self.refused.append((ticket, " ".join(path)))
        self.answer(ticket)


def test_a_deadlock_is_refused_in_the_last_check_and_not_before() -> None:
    scene = Scene("a")
    scene.call(scene.begin("a"), "a")
    assert scene.look(SCANS - 1) == []
    assert scene.look() == ["a a"]
    assert scene.clock.due == []


def test_call_that_is_free_in_the_last_check_is_not_refused() -> None:
    """An execution that sends a call, and is slow to return on a machine that is busy."""
    scene = Scene("a")
    scene.call(scene.begin("a"), "a")
    scene.look(SCANS - 1)
    scene.models["a"].executors[0].executing = ()  # it had only been about to return
    assert scene.look(SCANS + 3) == []
    for call in tuple(scene.sent):
        scene.answer(call)
    scene.look()
    assert scene.clock.due == []  # and there are no more checks


def test_a_long_queue_before_a_busy_model_is_no_deadlock() -> None:
    scene = Scene("a", "b")
    scene.begin("b")
    for _ in range(10):
        scene.call(scene.begin("a"), "b")
    assert scene.look(SCANS + SCANS_PER_SWEEP) == []


def test_a_free_instance_anywhere_on_the_way_keeps_from_a_deadlock() -> None:
    scene = Scene("a", "b", "c")
    scene.models["c"].executors.append(Executor())
    scene.call(scene.begin("a"), "b")
    scene.call(scene.begin("b"), "c")
    scene.call(scene.begin("c"), "a")
    assert scene.look(SCANS + 3) == []


def test_a_deadlock_that_closes_when_a_free_instance_is_removed_is_found() -> None:
    """It has no call and no answer: an execution returns, or another one gets the released resources."""
    scene = Scene("a", "b")
    scene.models["b"].executors.append(Executor())
    scene.call(scene.begin("a"), "b")
    scene.call(scene.begin("b"), "a")
    assert scene.look(SCANS + 3) == []
    scene.models["b"].executors.pop()
    assert scene.look(SCANS_PER_SWEEP + SCANS) == ["b a b"]


def test_a_call_is_stopped_when_every_caller_of_the_execution_has_left() -> None:
    scene = Scene("a", "b")
    stopped: list[Ticket] = []
    first, second = make_ticket("a"), make_ticket("a")
    call = scene.call(first, "b", awaiting=[first, second, Padding("a", {})])
    call.on_cancel = stopped.append
    first.cancel()
    scene.look(SCANS_PER_SWEEP)
    assert stopped == []  # the second may still wait for it
    second.cancel()
    scene.look()
    assert stopped == [call]
    assert not call.abandoned  # its model waits for the answer


def test_a_dead_instance_may_be_restarted() -> None:
    scene = Scene("a", "b")
    scene.models["b"].executors[0].alive = False
    scene.call(scene.begin("a"), "b")
    scene.call(scene.begin("b"), "a")
    assert scene.look(SCANS + 3) == []


def test_a_call_for_a_finished_execution_holds_nothing() -> None:
    scene = Scene("a", "b")
    before = scene.begin("a")
    scene.begin("a")
    scene.call(before, "b")
    scene.call(scene.begin("b"), "a")
    assert scene.look(SCANS + 3) == []


def test_a_call_without_its_request_is_taken_for_one_that_holds_its_instance() -> None:
    scene = Scene("a")
    scene.call(scene.begin("a"), "a", is_known=False)
    assert scene.look(SCANS) == ["a a"]


def test_a_deadlock_that_only_the_end_of_another_call_closes_is_found() -> None:
    scene = Scene("a", "b")
    begun = scene.begin("a")
    able, stuck = scene.call(begun, "b"), scene.call(begun, "a")
    assert scene.look(SCANS + 3) == []
    scene.answer(able)
    assert scene.look(SCANS) == ["a a"]
    assert scene.refused[0][0] is stuck


def test_a_deadlock_that_only_the_answer_of_one_step_closes_is_found() -> None:
    """``able`` is slow, as on a busy machine, and is the remaining way out when the first check is over."""
    scene = Scene("one", "two", "m")
    scene.models["m"].executors.clear()
    step = scene.call(scene.begin("two"), "m")
    scene.models["m"].waiting.clear()  # its scheduler has it, which calls two others
    able, stuck = scene.ask(step, "one"), scene.ask(step, "two")
    assert scene.look(SCANS + 3) == []
    scene.answer(able)
    assert scene.look(SCANS) == ["two m two"]
    assert scene.refused[0][0] is stuck


def test_a_deadlock_that_is_closed_when_one_call_of_a_returned_execution_ends_is_found() -> None:
    scene = Scene("later", "a", "b")
    call = scene.call(scene.begin("a"), "later")
    scene.models["later"].waiting.clear()
    scene.models["later"].executors[0].executing = [call]
    able, stuck = scene.call(call, "b"), scene.call(call, "a")
    scene.models["later"].executors[0].executing = ()  # it is answered when its calls are answered
    assert scene.look(SCANS + 3) == []
    scene.answer(able)
    assert scene.look(SCANS) == ["a later a"]
    assert scene.refused[0][0] is stuck


def test_a_request_that_is_answered_later_without_a_call_of_its_own_will_be() -> None:
    scene = Scene("a", "later")
    at_work = scene.call(scene.begin("a"), "later")
    other = scene.begin("later")
    scene.models["later"].waiting.discard(at_work)
    scene.models["later"].executors[0].executing = ()  # both executions have returned
    scene.call(other, "a")
    assert scene.look(SCANS + 3) == []


def test_the_path_leads_through_the_holders_of_the_needed_resources() -> None:
    scene = Scene("a", "b", "c")
    scene.call(scene.begin("a"), "b")
    scene.call(scene.begin("b"), "c")
    scene.call(scene.begin("c"), "b")
    assert scene.look(SCANS) == ["c b c"]


Edges = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12, unique=True)


@given(Edges)
def test_a_call_is_refused_exactly_if_it_closes_a_cycle_and_reaches_no_free_model(edges: list[tuple[int, int]]) -> None:
    """One instance each, and the oracle is the transitive closure, by matrix powers."""
    scene = Scene(*"abcde")
    begun = [scene.begin(name) for name in "abcde"]
    needs = np.zeros((5, 5), bool)
    for source, target in edges:
        scene.call(begun[source], "abcde"[target])
        needs[source, target] = True
    reach = np.linalg.matrix_power(needs.astype(np.int64) + np.eye(5, dtype=np.int64), 5) > 0
    free = ~needs.any(axis=1)
    stuck = {(a, b) for a, b in edges if reach[b, a] and not (reach[b] & free).any()}
    refused: list[Ticket] = []
    scene.deadlocks._refuse = lambda ticket, path: refused.append(ticket)
    scene.look(SCANS)
    calls = [ticket.request for ticket in refused]
    assert {("abcde".index(call.callers[-1]), "abcde".index(call.model_name)) for call in calls} == stuck


def test_call_that_only_waits_behind_a_deadlock_is_not_refused() -> None:
    scene = Scene("a", "b", "c")
    scene.call(scene.begin("b"), "c")
    scene.call(scene.begin("c"), "b")
    scene.call(scene.begin("a"), "b")
    assert scene.look(SCANS + 3) == ["c b c"]


def test_one_error_breaks_the_deadlock_of_all() -> None:
    scene = Scene("a")
    scene.models["a"].executors.append(Executor())
    scene.call(scene.begin("a", 0), "a", 0)
    scene.call(scene.begin("a", 1), "a", 1)
    assert scene.look(SCANS + 3) == ["a a"]


def test_a_call_that_waits_behind_another_deadlock_is_not_refused_with_its_like() -> None:
    scene = Scene("a", "b", "d", "e")
    scene.call(scene.begin("d"), "e")
    scene.call(scene.begin("e"), "d")
    begun = scene.begin("a")
    patient = scene.call(begun, "d")
    scene.call(scene.begin("b"), "a")
    scene.call(begun, "b")
    assert sorted(scene.look(SCANS)) == ["a b a", "e d e"]
    assert patient not in [ticket for ticket, _ in scene.refused]


def test_thousands_of_calls_that_are_stuck_together_do_not_hold_the_loop() -> None:
    scene = Scene("a", "b")
    begun = scene.begin("a")
    for _ in range(10_000):
        scene.call(begun, "a")
    able = scene.call(begun, "b")
    started = process_time()
    assert scene.look(SCANS + 3) == []
    scene.models["b"].waiting.clear()
    scene.deadlocks.discard(scene.models["a"].executors[0], able)  # type: ignore[arg-type]
    assert len(scene.look(SCANS)) == 10_000
    assert process_time() - started < 2  # quadratic would be minutes
