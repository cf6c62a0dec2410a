"""One broken scheduler per check: each must be caught by the check that is meant for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import (
    Answer,
    Batch,
    FullScheduler,
    InferRequest,
    InferResponse,
    InstanceInfo,
    ModelConfig,
    Padding,
    Problem,
    PublishedMetric,
    Scheduler,
    SchedulerContext,
    Tensor,
    Ticket,
    Wait,
)
from headrace.schedulers.model_queue import ModelQueue
from headrace_testing import SchedulerConformance

MS = 1_000_000
DELAY_NS = 2 * MS


class Sound(FullScheduler):
    """Batches the oldest requests that stack, after a delay of 2 ms if the batch is not full.

    It has timeouts and priorities.
    """

    name = "sound"
    metrics = (
        PublishedMetric("headrace_sound_submitted_total", "The number of requests", "counter"),
        PublishedMetric("headrace_sound_waiting", "Requests that wait"),
    )
    submitted_total = 0

    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        if config.metric_tags:
            yield Problem("metric_tags", "it has no tags")

    def measure(self) -> Mapping[str, float]:
        return {
            "headrace_sound_submitted_total": self.submitted_total,
            "headrace_sound_waiting": len(self.context.waiting),
        }

    def submit(self, ticket: Ticket) -> int | None:
        self.submitted_total += 1
        if ticket.request.timeout_us:
            ticket.deadline_ns = ticket.queued_ns + ticket.request.timeout_us * 1000
        return ticket.request.priority or None

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        waiting = self.context.waiting.head(instance.slots)
        batch = self.fitting(waiting, instance.slots)
        if not batch:
            return ()
        left_ns = batch[0].queued_ns + self.delay_ns() - now_ns
        is_full = len(batch) < len(waiting) or sum(ticket.rows for ticket in batch) == instance.slots
        return batch if is_full or left_ns <= 0 else Wait(left_ns)

    def fitting(self, waiting: Sequence[Ticket], slots: int) -> list[Ticket]:
        batch: list[Ticket] = []
        for ticket in waiting:
            if ticket.batch_key != waiting[0].batch_key or sum(each.rows for each in batch) + ticket.rows > slots:
                break
            batch.append(ticket)
        return batch

    def delay_ns(self) -> int:
        return DELAY_NS

    def instances_changed(self) -> None:
        """Nothing depends on the instances."""


class Postpones(Sound):
    """Lets requests wait after their deadline."""

    def expired(self, ticket: Ticket) -> int | None:
        return 1


class KeepsOrder(Sound):
    """Delivers answers in the order of requests."""

    keeps_order = True


class RunsAgain(Sound):
    """Reschedules requests that their model hands back."""

    @classmethod
    def reschedules(cls, config: ModelConfig) -> bool:
        return True

    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        return None


class Forwards(FullScheduler):
    """Forwards each request to another model, and needs no instances."""

    name, needs_instances = "sound", False

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.calls: dict[Ticket, Ticket] = {}

    def submit(self, ticket: Ticket) -> int | None:
        request = ticket.request
        callers = (*request.callers, self.context.config.name)
        forwarded = InferRequest("other", request.inputs, id=request.id, callers=callers, caller=request)
        self.calls[ticket] = Ticket(forwarded, partial(self.answered, ticket))
        self.context.call(self.calls[ticket])
        return 0

    def answered(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        self.context.answer(ticket, answer, final)

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        for ticket in tickets:
            self.calls.pop(ticket).cancel()

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        raise AssertionError("there are no instances")


class SoundConformance(SchedulerConformance):
    plugin, scheduler = "headrace_sound", "sound"
    delay_ns, timeout_us, levels = DELAY_NS, 700, 3
    mistakes: ClassVar = {'metric_tags { key: "a" value: "b" }': "metric_tags"}
    kind: ClassVar[type[Scheduler]] = Sound

    @property
    def scheduler_class(self) -> type[Scheduler]:
        return self.kind


class PostponingConformance(SoundConformance):
    postpones, kind = True, Postpones


class ForwardingConformance(SoundConformance):
    others, kind = ("other",), Forwards
    mistakes: ClassVar = {}


#: The conformance class of a scheduler that is derived from each sound one.
CONFORMANCES: dict[type[Scheduler], type[SoundConformance]] = {
    Forwards: ForwardingConformance,
    Postpones: PostponingConformance,
    KeepsOrder: SoundConformance,
    RunsAgain: SoundConformance,
    Sound: SoundConformance,
}

# ---------------------------------------------------------------------- saboteurs


class KeepsRemovedInstances(Sound):
    def lets_go(self, instance: InstanceInfo) -> bool:
        return False


class LosesOne(Sound):
    def submit(self, ticket: Ticket) -> int | None:
        super().submit(ticket)
        return 0 if ticket.request.id == "7" else None


class AnswersTwice(Sound):
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        chosen = super().next(instance, now_ns)
        for ticket in () if isinstance(chosen, Wait) else chosen:
            ticket.respond(InferResponse({}, id=ticket.request.id), True)
        return chosen


class SwapsAnswers(Sound):
    """Gives each caller the answer of another."""

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        if isinstance(answers, list):
            answers.reverse()


class DropsRescheduled(RunsAgain):
    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        return 0


class DoesNotReschedule(RunsAgain):
    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        return Sound.rescheduled(self, ticket, outputs, instance)


class AnswersRescheduled(RunsAgain):
    """Answers after the first run."""

    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        self.context.answer(ticket, InferResponse({}, id=ticket.request.id), True)
        return 0


class StopsAfterAFailure(Sound):
    is_broken = False

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return () if self.is_broken else super().next(instance, now_ns)

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        self.is_broken = not all(isinstance(answer, InferResponse) for answer in answers)


class IgnoresCancellation(Sound):
    """Keeps its own list, which includes cancelled requests."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.own: list[Ticket] = []

    def submit(self, ticket: Ticket) -> int | None:
        self.own.append(ticket)
        return super().submit(ticket)

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        batch = self.fitting(self.own, instance.slots)
        self.own = self.own[len(batch) :]
        return batch


class CancelsOthers(Sound):
    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        if any(ticket.cancelled for ticket in tickets):
            for ticket in tuple(self.context.waiting):
                ticket.cancel()


class HoldsTheLastRequest(Sound):
    """Waits for a second request, of any kind."""

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return super().next(instance, now_ns) if len(self.context.waiting) > 1 else ()


class TakesTooMany(Sound):
    def fitting(self, waiting: Sequence[Ticket], slots: int) -> list[Ticket]:
        return [ticket for ticket in waiting if ticket.batch_key == waiting[0].batch_key]


class JoinsRequestsThatDoNotStack(Sound):
    def fitting(self, waiting: Sequence[Ticket], slots: int) -> list[Ticket]:
        return [ticket for ticket in self.context.waiting if ticket.rows == 1][:slots] or list(waiting[:1])


class RunsOneTwice(Sound):
    def fitting(self, waiting: Sequence[Ticket], slots: int) -> list[Ticket]:
        return [*waiting[:1], *waiting[:1]]


class PadsOnly(Sound):
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        padding = Padding("conformance", {"x": np.zeros((1, 1), np.float32)})
        return Batch([padding]) if len(self.context.waiting) > 9 else super().next(instance, now_ns)


class AddsToTheFirstOnly(Sound):
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        chosen = super().next(instance, now_ns)
        return chosen if isinstance(chosen, Wait) or not chosen else Batch(chosen, [{}] * (len(chosen) + 1))


class ReasonsInNumbers(Sound):
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        chosen = super().next(instance, now_ns)
        return chosen if isinstance(chosen, Wait) or not chosen else Batch(chosen, reason=7)  # type: ignore[arg-type]


class MiscountsItsRows(Sound):
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        chosen = super().next(instance, now_ns)
        return chosen if isinstance(chosen, Wait) or not chosen else Batch(chosen, reason="sound", rows=99)


class IsEarly(Sound):
    def delay_ns(self) -> int:
        return DELAY_NS - 1000


class IsLate(Sound):
    def delay_ns(self) -> int:
        return DELAY_NS + 1000


class NeverWakes(Sound):
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        chosen = super().next(instance, now_ns)
        return Wait(1 << 62, 1 << 30) if isinstance(chosen, Wait) else chosen


class LastComeFirstServed(Sound):
    def fitting(self, waiting: Sequence[Ticket], slots: int) -> list[Ticket]:
        return super().fitting(waiting[::-1], slots)


class SmallestFirst(Sound):
    """Large requests starve."""

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return self.fitting(sorted(self.context.waiting, key=lambda ticket: ticket.rows), instance.slots)


class UsesOneInstance(Sound):
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return super().next(instance, now_ns) if instance.name.endswith("_0") else ()


class RejectsLate(Sound):
    def submit(self, ticket: Ticket) -> int | None:
        if ticket.request.timeout_us:
            ticket.deadline_ns = ticket.queued_ns + ticket.request.timeout_us * 1000 + 1000
        return None


class RejectsEarly(Sound):
    def submit(self, ticket: Ticket) -> int | None:
        if ticket.request.timeout_us:
            ticket.deadline_ns = ticket.queued_ns + ticket.request.timeout_us * 1000 - 1000
        return None


class IgnoresPriorities(Sound):
    def submit(self, ticket: Ticket) -> int | None:
        super().submit(ticket)
        return None


class RejectsInsteadOfPostponing(Postpones):
    def expired(self, ticket: Ticket) -> int | None:
        return None


class PostponesToTheFront(Postpones):
    def expired(self, ticket: Ticket) -> int | None:
        return 0


class PostponesEarly(Postpones):
    def submit(self, ticket: Ticket) -> int | None:
        level = super().submit(ticket)
        ticket.deadline_ns = max(ticket.deadline_ns - 1000, 0)
        return level


class PromisesOrderTooLate(Sound):
    def submit(self, ticket: Ticket) -> int | None:
        self.keeps_order = True
        return super().submit(ticket)


class WakesWithoutEnd(Sound):
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        self.context.ask_again()
        return super().next(instance, now_ns)


class WaitsForNothing(Sound):
    """Forwards to be called again every millisecond, even if no request waits."""

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return super().next(instance, now_ns) or Wait(MS)


class ForgetsItsTimer(Sound):
    def submit(self, ticket: Ticket) -> int | None:
        self.tick()
        return super().submit(ticket)

    def tick(self) -> None:
        self.context.clock.call_later(1000 * MS, self.tick)


class Miscounts(Sound):
    def submit(self, ticket: Ticket) -> int | None:
        ticket.rows = 1
        return super().submit(ticket)


class RaisesInFinished(Sound):
    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        raise KeyError("finished")


class FailsToMeasureWhenEmpty(Sound):
    """Reads the first waiting request although none waits."""

    def measure(self) -> Mapping[str, float]:
        return {**super().measure(), "headrace_sound_waiting": next(iter(self.context.waiting)).rows}


class ForgetsToMeasure(Sound):
    def measure(self) -> Mapping[str, float]:
        return {"headrace_sound_waiting": 0}


class CountsBackwards(Sound):
    def measure(self) -> Mapping[str, float]:
        return {**super().measure(), "headrace_sound_submitted_total": len(self.context.waiting)}


class MeasuresInWords(Sound):
    def measure(self) -> Mapping[str, float]:
        return {**super().measure(), "headrace_sound_waiting": "none"}  # type: ignore[dict-item]


class SwapsForwardedAnswers(Forwards):
    """Gives each caller the answer to the previous call."""

    last: Answer = None

    def answered(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        previous, self.last = self.last or answer, answer
        super().answered(ticket, previous, final)


class CallsWithoutCaller(Forwards):
    def submit(self, ticket: Ticket) -> int | None:
        self.calls[ticket] = Ticket(InferRequest("other", ticket.request.inputs), partial(self.answered, ticket))
        self.context.call(self.calls[ticket])
        return 0


class CallsWithoutCallers(Forwards):
    def submit(self, ticket: Ticket) -> int | None:
        forwarded = InferRequest("other", ticket.request.inputs, caller=ticket.request)
        self.calls[ticket] = Ticket(forwarded, partial(self.answered, ticket))
        self.context.call(self.calls[ticket])
        return 0


class SwallowsFailures(Forwards):
    def answered(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        if isinstance(answer, InferResponse):
            super().answered(ticket, answer, final)


class AnswersFailuresWithSuccess(Forwards):
    def answered(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        super().answered(ticket, answer if isinstance(answer, InferResponse) else InferResponse({}), final)


class ContinuesCancelledCalls(Forwards):
    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        pass


class AnswersPastTheModelQueue(Forwards):
    def answered(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        ticket.respond(answer, final)


class RefusesAll(Sound):
    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        return [Problem("name", "no")]


class AcceptsEveryConfig(Sound):
    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        return ()


class CompletesWhileItChecks(Sound):
    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        config.dynamic_batching.SetInParent()
        return ()


class YieldsTexts(Sound):
    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        return ["no"]  # type: ignore[list-item]


class NamesNoField(Sound):
    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        return [Problem("", problem.message) for problem in super().check_config(config, completed=completed)]


@dataclass(frozen=True, slots=True)
class TakesAny:
    rest: Mapping[str, str] = field(default_factory=dict, metadata={"prefix": ""})


class TakesAnyParameter(Sound):
    Parameters = TakesAny


SABOTEURS = [
    ("every_request_is_answered_exactly_once", LosesOne, "requests ['7'] still wait"),
    ("every_request_is_answered_exactly_once", AnswersTwice, "is answered 2 times"),
    ("every_request_is_answered_exactly_once", SwapsAnswers, "gets the answer of"),
    ("every_request_is_answered_exactly_once", RaisesInFinished, "finished raised KeyError('finished')"),
    ("every_request_is_answered_exactly_once", NeverWakes, "still wait"),
    ("after_a_failed_batch_the_next_is_run", StopsAfterAFailure, "nothing will ever wake it"),
    ("a_cancelled_waiting_request_is_answered_at_once_and_alone", IgnoresCancellation, "does not wait"),
    ("a_cancelled_running_request_is_answered_alone", CancelsOthers, "gets Cancelled"),
    ("a_rescheduled_request_runs_again_until_it_is_answered", DropsRescheduled, "] still wait"),
    ("a_rescheduled_request_runs_again_until_it_is_answered", DoesNotReschedule, "gets Rescheduled"),
    ("a_rescheduled_request_runs_again_until_it_is_answered", AnswersRescheduled, "have run this often"),
    ("draining_runs_accepted_requests_and_refuses_new_ones", HoldsTheLastRequest, "requests ['0'] still wait"),
    ("abandoning_answers_every_request_at_once", AnswersTwice, "gets ["),
    ("abandoning_answers_every_request_at_once", ForgetsItsTimer, "timers are left after the last answer"),
    ("batches_fit_their_instances", TakesTooMany, "rows, and the instance has 8 slots"),
    ("batches_fit_their_instances", JoinsRequestsThatDoNotStack, "joins requests that do not stack"),
    ("batches_fit_their_instances", RunsOneTwice, "has a request twice"),
    ("batches_fit_their_instances", PadsOnly, "is nothing but padding"),
    ("batches_fit_their_instances", AddsToTheFirstOnly, "adds inputs to"),
    ("batches_fit_their_instances", ReasonsInNumbers, "has the reason 7, which is no text"),
    ("batches_fit_their_instances", MiscountsItsRows, "declares 99 rows"),
    ("a_single_request_waits_delay_ns_to_the_microsecond", IsEarly, "is run before 2000 µs"),
    ("a_single_request_waits_delay_ns_to_the_microsecond", IsLate, "is not run after 2000 µs"),
    (
        "equal_requests_run_in_order_of_arrival",
        LastComeFirstServed,
        "they arrived in order of their numbers, and ran as",
    ),
    ("a_request_does_not_starve", SmallestFirst, "because others keep arriving"),
    ("answers_keep_the_order_of_requests", PromisesOrderTooLate, "before an earlier one"),
    ("requests_run_in_order_of_priority", IgnoresPriorities, "run in the order [3, 2, 1, 3, 2, 1]"),
    ("a_postponed_request_runs_after_all_others", RejectsInsteadOfPostponing, "must be postponed gets [Unavailable"),
    ("a_postponed_request_runs_after_all_others", PostponesToTheFront, "is number 1 of 0 to 3 to run after 700"),
    ("a_postponed_request_runs_after_all_others", PostponesEarly, "is number 3 of 0 to 3 to run after 699"),
    ("instances_are_added_and_removed_under_load", KeepsRemovedInstances, "stays, although every request is answered"),
    ("every_request_is_answered_exactly_once", SwapsForwardedAnswers, "gets the answer of"),
    ("calls_of_other_models_name_their_caller", CallsWithoutCaller, "names None as its caller"),
    ("calls_of_other_models_name_their_caller", CallsWithoutCallers, "names () as its callers"),
    ("a_failure_of_all_called_models_is_an_error", SwallowsFailures, "and it is answered 0 times"),
    (
        "a_failure_of_all_called_models_is_an_error",
        AnswersFailuresWithSuccess,
        "have failed, and it gets InferResponse",
    ),
    ("cancelling_a_request_cancels_its_calls_of_other_models", ContinuesCancelledCalls, "['other'] still run calls"),
    ("abandoning_answers_requests_that_wait_for_other_models", AnswersPastTheModelQueue, "gets ["),
    ("every_idle_instance_gets_waiting_requests", UsesOneInstance, "2 instances are idle, while 1 should be"),
    ("a_timeout_is_exact_to_the_microsecond", RejectsLate, "has no answer after that time"),
    ("a_timeout_is_exact_to_the_microsecond", RejectsEarly, "is rejected before"),
    ("next_is_not_called_while_nothing_changes", WakesWithoutEnd, "times in 50 passes of the loop"),
    ("next_is_not_called_while_nothing_changes", WaitsForNothing, "in a minute without requests"),
    ("next_is_not_called_while_nothing_changes", ForgetsItsTimer, "a timer is set, but no request waits"),
    ("threads_run_all_requests_and_the_statistics_add_up", Miscounts, "are counted instead of"),
    ("metrics_can_be_read_at_any_time", FailsToMeasureWhenEmpty, "cannot be read: StopIteration()"),
    ("metrics_can_be_read_at_any_time", ForgetsToMeasure, "it measures ['headrace_sound_waiting'], and has"),
    ("metrics_can_be_read_at_any_time", CountsBackwards, "counter 'headrace_sound_submitted_total' went from 4 to 0"),
    ("metrics_can_be_read_at_any_time", MeasuresInWords, "cannot be read: ValueError("),
    ("it_accepts_its_config_and_reports_each_mistake", RefusesAll, "the config of the kit is refused"),
    ("it_accepts_its_config_and_reports_each_mistake", AcceptsEveryConfig, "must give a problem of metric_tags"),
    ("it_accepts_its_config_and_reports_each_mistake", CompletesWhileItChecks, "has changed the config"),
    ("it_accepts_its_config_and_reports_each_mistake", YieldsTexts, "'no', which is no Problem"),
    ("it_accepts_its_config_and_reports_each_mistake", NamesNoField, "'it has no tags' has no field"),
    ("an_unknown_parameter_is_refused", TakesAnyParameter, "the parameter 'no_such_parameter' is accepted"),
]


def run(check: str, kind: type[Scheduler]) -> None:
    base = next(base for sound, base in CONFORMANCES.items() if issubclass(kind, sound))
    getattr(type(kind.__name__, (base,), {"kind": kind})(), f"test_{check}")()


#: Checks that start a server, or need Parameters, which the sound schedulers do not have.
ELSEWHERE = {"a_server_finds_and_serves_it", "an_unknown_parameter_is_refused"}
CHECKS = {name[5:] for name in dir(SchedulerConformance) if name.startswith("test_")}


@pytest.mark.parametrize("check", sorted(CHECKS - ELSEWHERE))
def test_sound_schedulers_pass(check: str) -> None:
    passed = []
    for kind in CONFORMANCES:
        with suppress(pytest.skip.Exception):  # the check is not claimed
            run(check, kind)
            passed.append(kind)
    assert passed


@pytest.mark.parametrize(("check", "kind", "because"), SABOTEURS, ids=[kind.__name__ for _, kind, _ in SABOTEURS])
def test_a_saboteur_is_caught(check: str, kind: type[Scheduler], because: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run(check, kind)
    assert because in str(caught.value)


@pytest.mark.parametrize("check", [name for name in sorted(CHECKS) if name.startswith("a_cancelled_")])
def test_a_model_queue_that_ignores_cancellation_is_caught(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_twice(self: ModelQueue, ticket: Ticket) -> None:
        for _ in range(2):
            ticket.respond(InferResponse({}), True)

    monkeypatch.setattr(ModelQueue, "_answer_waiting" if "waiting" in check else "_cancel", lambda self, *_: None)
    if "running" in check:
        monkeypatch.setattr(ModelQueue, "_cancel", answer_twice)
    with pytest.raises(AssertionError, match=r"answered at once|gets \["):
        run(check, Sound)


PLUGIN = """
from headrace import Scheduler, hookimpl

class Sound(Scheduler):
    name = "sound"

    def next(self, instance, now_ns):
        return self.context.waiting.head(1)

@hookimpl
def register_schedulers():
    return [Sound]
"""


def install(plugin: str, entry_points: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``plugin`` the module of an installed distribution."""
    info = folder / "headrace_sound-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-sound\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / "headrace_sound.py").write_text(plugin)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "headrace_sound", raising=False)


@pytest.mark.parametrize(
    ("entry_points", "plugin", "because"),
    [
        ("[headrace]\nsound = headrace_sound\n", PLUGIN, ""),
        ("", PLUGIN, 'add an entry point of the group headrace: sound = "headrace_sound"'),
        ("[headrace]\nsound = headrace_sound\n",
         PLUGIN.replace('"sound"', '"sound"\n\n    def __init__(self, context):\n        raise KeyError("made")'),
         "does not load"),
    ],
)  # fmt: skip
def test_a_scheduler_that_no_server_finds_is_caught(
    entry_points: str,
    plugin: str,
    because: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(plugin, entry_points, tmp_path, monkeypatch)
    if not because:
        SoundConformance().test_a_server_finds_and_serves_it(tmp_path_factory)
        return
    with pytest.raises(AssertionError) as caught:
        SoundConformance().test_a_server_finds_and_serves_it(tmp_path_factory)
    assert because in str(caught.value)


def test_a_scheduler_without_instances_is_served(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = f"from headrace import hookimpl\nfrom {__name__} import Forwards\n\n"
    plugin += "@hookimpl\ndef register_schedulers():\n    return [Forwards]\n"
    install(plugin, "[headrace]\nsound = headrace_sound\n", tmp_path, monkeypatch)
    ForwardingConformance().test_a_server_finds_and_serves_it(tmp_path_factory)


def test_a_check_of_an_unclaimed_property_is_skipped() -> None:
    class Starving(SoundConformance):
        kind, longest_wait_ns = SmallestFirst, None

    with pytest.raises(pytest.skip.Exception, match="conformance: sound: no longest wait is claimed"):
        Starving().test_a_request_does_not_starve()


def test_every_check_has_a_saboteur() -> None:
    assert {check for check, _, _ in SABOTEURS} | {"a_server_finds_and_serves_it"} == CHECKS
