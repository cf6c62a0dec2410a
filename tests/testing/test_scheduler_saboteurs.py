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
    """As many as fit of those that stack with the oldest; 2 ms for more, unless the batch is full. Keeps timeouts and
    priorities."""

    name = "sound"
    metrics = (
        PublishedMetric("headrace_sound_asked_total", "How often it was asked", "counter"),
        PublishedMetric("headrace_sound_waiting", "Requests that wait"),
    )
    asked_total = 0

    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        if config.metric_tags:
            yield Problem("metric_tags", "it has no tags")

    def measure(self) -> Mapping[str, float]:
        return {"headrace_sound_asked_total": self.asked_total, "headrace_sound_waiting": len(self.context.waiting)}

    def submit(self, ticket: Ticket) -> int | None:
        self.asked_total += 1
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
        """It has nothing to do with them."""


class Postpones(Sound):
    """Lets requests wait after their deadline."""

    def expired(self, ticket: Ticket) -> int | None:
        return 1


class KeepsOrder(Sound):
    """Delivers answers in the order of requests."""

    keeps_order = True


class RunsAgain(Sound):
    """Takes back what its model wants to run again."""

    @classmethod
    def reschedules(cls, config: ModelConfig) -> bool:
        return True

    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        return None


class Asks(FullScheduler):
    """Lets another model answer, and needs no instances."""

    name, needs_instances = "sound", False

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.asked: dict[Ticket, Ticket] = {}

    def submit(self, ticket: Ticket) -> int | None:
        request = ticket.request
        callers = (*request.callers, self.context.config.name)
        asked = InferRequest("other", request.inputs, id=request.id, callers=callers, caller=request)
        self.asked[ticket] = Ticket(asked, partial(self.heard, ticket))
        self.context.call(self.asked[ticket])
        return 0

    def heard(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        self.context.answer(ticket, answer, final)

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        for ticket in tickets:
            self.asked.pop(ticket).cancel()

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


class AskingConformance(SoundConformance):
    others, kind = ("other",), Asks
    mistakes: ClassVar = {}


#: What a scheduler is held to that is made of the one in front.
CONFORMANCES: dict[type[Scheduler], type[SoundConformance]] = {
    Asks: AskingConformance,
    Postpones: PostponingConformance,
    KeepsOrder: SoundConformance,
    RunsAgain: SoundConformance,
    Sound: SoundConformance,
}

# ---------------------------------------------------------------------- saboteurs


class NeverLetsGo(Sound):
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
    """Hands what one caller sent to another."""

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        if isinstance(answers, list):
            answers.reverse()


class LosesWhatComesBack(RunsAgain):
    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        return 0


class TakesNothingBack(RunsAgain):
    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        return Sound.rescheduled(self, ticket, outputs, instance)


class AnswersWhatComesBack(RunsAgain):
    """Takes a run for the last."""

    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        self.context.answer(ticket, InferResponse({}, id=ticket.request.id), True)
        return 0


class GivesUpAfterAFailure(Sound):
    is_broken = False

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return () if self.is_broken else super().next(instance, now_ns)

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        self.is_broken = not all(isinstance(answer, InferResponse) for answer in answers)


class IgnoresWhoLeaves(Sound):
    """Keeps a list of its own, and never hears of those who leave."""

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


class CancelsTheNeighbours(Sound):
    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        if any(ticket.cancelled for ticket in tickets):
            for ticket in tuple(self.context.waiting):
                ticket.cancel()


class HoldsWhatIsLeft(Sound):
    """Waits for a second request, of any kind."""

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return super().next(instance, now_ns) if len(self.context.waiting) > 1 else ()


class TakesTooMany(Sound):
    def fitting(self, waiting: Sequence[Ticket], slots: int) -> list[Ticket]:
        return [ticket for ticket in waiting if ticket.batch_key == waiting[0].batch_key]


class JoinsWhatDoesNotStack(Sound):
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
    """For ever."""

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return self.fitting(sorted(self.context.waiting, key=lambda ticket: ticket.rows), instance.slots)


class LikesOneInstance(Sound):
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


class RejectsWhoIsToBePostponed(Postpones):
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
    """Asks to be called again every millisecond, even if no request waits."""

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


class RaisesWhenItHears(Sound):
    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        raise KeyError("finished")


class StumblesOverItsOldest(Sound):
    """Reads the first waiting request although none waits."""

    def measure(self) -> Mapping[str, float]:
        return {**super().measure(), "headrace_sound_waiting": next(iter(self.context.waiting)).rows}


class ForgetsToMeasure(Sound):
    def measure(self) -> Mapping[str, float]:
        return {"headrace_sound_waiting": 0}


class CountsBackwards(Sound):
    def measure(self) -> Mapping[str, float]:
        return {**super().measure(), "headrace_sound_asked_total": len(self.context.waiting)}


class MeasuresInWords(Sound):
    def measure(self) -> Mapping[str, float]:
        return {**super().measure(), "headrace_sound_waiting": "none"}  # type: ignore[dict-item]


class SwapsWhatItHears(Asks):
    """Gives each the answer to the one before."""

    last: Answer = None

    def heard(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        given, self.last = self.last or answer, answer
        super().heard(ticket, given, final)


class AsksForNobody(Asks):
    def submit(self, ticket: Ticket) -> int | None:
        self.asked[ticket] = Ticket(InferRequest("other", ticket.request.inputs), partial(self.heard, ticket))
        self.context.call(self.asked[ticket])
        return 0


class ForgetsItsOwnName(Asks):
    def submit(self, ticket: Ticket) -> int | None:
        asked = InferRequest("other", ticket.request.inputs, caller=ticket.request)
        self.asked[ticket] = Ticket(asked, partial(self.heard, ticket))
        self.context.call(self.asked[ticket])
        return 0


class SwallowsFailures(Asks):
    def heard(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        if isinstance(answer, InferResponse):
            super().heard(ticket, answer, final)


class EmbellishesFailures(Asks):
    def heard(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        super().heard(ticket, answer if isinstance(answer, InferResponse) else InferResponse({}), final)


class AsksOnForNobody(Asks):
    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Any], instance: InstanceInfo | None) -> None:
        pass


class AnswersPastTheKernel(Asks):
    def heard(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        ticket.respond(answer, final)


class RefusesAll(Sound):
    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        return [Problem("name", "no")]


class ForgetsItsRules(Sound):
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
    ("test_every_request_is_answered_exactly_once", LosesOne, "requests ['7'] still wait"),
    ("test_every_request_is_answered_exactly_once", AnswersTwice, "is answered 2 times"),
    ("test_every_request_is_answered_exactly_once", SwapsAnswers, "gets the answer of"),
    ("test_every_request_is_answered_exactly_once", RaisesWhenItHears, "finished raised KeyError('finished')"),
    ("test_every_request_is_answered_exactly_once", NeverWakes, "still wait"),
    ("test_after_a_failed_batch_the_next_is_run", GivesUpAfterAFailure, "nothing will ever wake it"),
    ("test_cancelling_a_waiting_request_answers_it_at_once_and_disturbs_nobody", IgnoresWhoLeaves, "does not wait"),
    ("test_cancelling_a_running_request_disturbs_nobody", CancelsTheNeighbours, "is told Cancelled"),
    ("test_what_its_model_hands_back_is_run_again_until_it_is_answered", LosesWhatComesBack, "] still wait"),
    ("test_what_its_model_hands_back_is_run_again_until_it_is_answered", TakesNothingBack, "is told Rescheduled"),
    ("test_what_its_model_hands_back_is_run_again_until_it_is_answered", AnswersWhatComesBack, "have run so often"),
    ("test_draining_runs_what_was_taken_in_and_takes_no_more", HoldsWhatIsLeft, "requests ['0'] still wait"),
    ("test_abandoning_answers_everybody_at_once", AnswersTwice, "is told ["),
    ("test_abandoning_answers_everybody_at_once", ForgetsItsTimer, "timers are left when all is over"),
    ("test_batches_fit_their_instances", TakesTooMany, "rows, and the instance has 8 slots"),
    ("test_batches_fit_their_instances", JoinsWhatDoesNotStack, "joins requests that do not stack"),
    ("test_batches_fit_their_instances", RunsOneTwice, "has a request twice"),
    ("test_batches_fit_their_instances", PadsOnly, "is nothing but padding"),
    ("test_batches_fit_their_instances", AddsToTheFirstOnly, "adds inputs to"),
    ("test_batches_fit_their_instances", ReasonsInNumbers, "has the reason 7, which is no text"),
    ("test_batches_fit_their_instances", MiscountsItsRows, "is said to have 99 rows"),
    ("test_a_request_alone_waits_as_long_as_is_said_to_the_microsecond", IsEarly, "is run before 2000 µs"),
    ("test_a_request_alone_waits_as_long_as_is_said_to_the_microsecond", IsLate, "is not run after 2000 µs"),
    (
        "test_requests_that_differ_in_nothing_run_in_the_order_in_which_they_came",
        LastComeFirstServed,
        "they came in order of their numbers, and ran as",
    ),
    ("test_a_request_is_run_however_many_others_keep_coming", SmallestFirst, "because others keep coming"),
    ("test_answers_are_given_in_order_if_the_scheduler_keeps_it", PromisesOrderTooLate, "before one that came before"),
    (
        "test_requests_run_in_the_order_of_their_priorities",
        IgnoresPriorities,
        "run in the order [3, 2, 1, 3, 2, 1]",
    ),
    (
        "test_whose_time_is_over_waits_on_behind_all_others_if_it_is_postponed",
        RejectsWhoIsToBePostponed,
        "to be postponed is told [Unavailable",
    ),
    (
        "test_whose_time_is_over_waits_on_behind_all_others_if_it_is_postponed",
        PostponesToTheFront,
        "is number 1 of 0 to 3 to run after 700",
    ),
    (
        "test_whose_time_is_over_waits_on_behind_all_others_if_it_is_postponed",
        PostponesEarly,
        "is number 3 of 0 to 3 to run after 699",
    ),
    ("test_instances_may_come_and_go", NeverLetsGo, "is not let go, though everybody is answered"),
    ("test_every_request_is_answered_exactly_once", SwapsWhatItHears, "gets the answer of"),
    ("test_what_is_asked_of_other_models_says_for_whom", AsksForNobody, "has None for its caller"),
    ("test_what_is_asked_of_other_models_says_for_whom", ForgetsItsOwnName, "has () for its callers"),
    ("test_a_failure_of_all_models_that_are_asked_is_told", SwallowsFailures, "and it is answered 0 times"),
    ("test_a_failure_of_all_models_that_are_asked_is_told", EmbellishesFailures, "has failed: told InferResponse"),
    ("test_who_leaves_takes_along_what_was_asked_for_him", AsksOnForNobody, "['other'] are still asked"),
    ("test_abandoning_answers_those_for_whom_other_models_are_asked", AnswersPastTheKernel, "which is told ["),
    ("test_every_idle_instance_gets_what_waits", LikesOneInstance, "2 instances are idle, while 1 should be"),
    ("test_a_timeout_is_kept_to_the_microsecond", RejectsLate, "is told nothing when they are over"),
    ("test_a_timeout_is_kept_to_the_microsecond", RejectsEarly, "is rejected before"),
    ("test_nobody_is_asked_while_nothing_changes", WakesWithoutEnd, "times in 50 turns of the loop"),
    ("test_nobody_is_asked_while_nothing_changes", WaitsForNothing, "in a minute without requests"),
    ("test_nobody_is_asked_while_nothing_changes", ForgetsItsTimer, "a timer is set, but no request waits"),
    ("test_threads_run_everything_and_the_statistics_add_up", Miscounts, "are counted, and there were"),
    ("test_its_metrics_can_be_read_at_any_time", StumblesOverItsOldest, "cannot be read: StopIteration()"),
    ("test_its_metrics_can_be_read_at_any_time", ForgetsToMeasure, "it measures ['headrace_sound_waiting'], and has"),
    (
        "test_its_metrics_can_be_read_at_any_time",
        CountsBackwards,
        "counter 'headrace_sound_asked_total' went from 4 to 0",
    ),
    ("test_its_metrics_can_be_read_at_any_time", MeasuresInWords, "cannot be read: ValueError("),
    ("test_it_accepts_its_config_and_names_each_mistake", RefusesAll, "the config of the kit is refused"),
    ("test_it_accepts_its_config_and_names_each_mistake", ForgetsItsRules, "a problem of metric_tags is expected"),
    ("test_it_accepts_its_config_and_names_each_mistake", CompletesWhileItChecks, "has changed the config"),
    ("test_it_accepts_its_config_and_names_each_mistake", YieldsTexts, "'no', which is no Problem"),
    ("test_it_accepts_its_config_and_names_each_mistake", NamesNoField, "'it has no tags' has no field"),
    ("test_an_unknown_parameter_is_named_with_the_known", TakesAnyParameter, "nothing is said of the parameter"),
]


def run(check: str, kind: type[Scheduler]) -> None:
    base = next(base for sound, base in CONFORMANCES.items() if issubclass(kind, sound))
    getattr(type(kind.__name__, (base,), {"kind": kind})(), check)()


#: They have a server, or need parameters that the sound one does without.
ELSEWHERE = {"test_a_server_finds_and_serves_it", "test_an_unknown_parameter_is_named_with_the_known"}
CHECKS = {name for name in dir(SchedulerConformance) if name.startswith("test_")}


@pytest.mark.parametrize("check", sorted(CHECKS - ELSEWHERE))
def test_sound_schedulers_pass(check: str) -> None:
    passed = []
    for kind in CONFORMANCES:
        with suppress(pytest.skip.Exception):  # it claims something else
            run(check, kind)
            passed.append(kind)
    assert passed


@pytest.mark.parametrize(("check", "kind", "because"), SABOTEURS, ids=[kind.__name__ for _, kind, _ in SABOTEURS])
def test_a_saboteur_is_caught(check: str, kind: type[Scheduler], because: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run(check, kind)
    assert because in str(caught.value)


@pytest.mark.parametrize(
    "check",
    [
        "test_cancelling_a_waiting_request_answers_it_at_once_and_disturbs_nobody",
        "test_cancelling_a_running_request_disturbs_nobody",
    ],
)
def test_a_kernel_that_forgets_who_leaves_is_caught(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_twice(self: ModelQueue, ticket: Ticket) -> None:
        for _ in range(2):
            ticket.respond(InferResponse({}), True)

    monkeypatch.setattr(ModelQueue, "_answer_waiting" if "waiting" in check else "_cancel", lambda self, *given: None)
    if "running" in check:
        monkeypatch.setattr(ModelQueue, "_cancel", answer_twice)
    with pytest.raises(AssertionError, match=r"answered at once|is told"):
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
def test_a_scheduler_that_a_server_cannot_have_is_caught(
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
    plugin = f"from headrace import hookimpl\nfrom {__name__} import Asks\n\n"
    plugin += "@hookimpl\ndef register_schedulers():\n    return [Asks]\n"
    install(plugin, "[headrace]\nsound = headrace_sound\n", tmp_path, monkeypatch)
    AskingConformance().test_a_server_finds_and_serves_it(tmp_path_factory)


def test_a_check_of_what_is_not_claimed_is_skipped() -> None:
    class Starving(SoundConformance):
        kind, longest_wait_ns = SmallestFirst, None

    with pytest.raises(pytest.skip.Exception, match="conformance: sound: how long a request may wait"):
        Starving().test_a_request_is_run_however_many_others_keep_coming()


def test_every_check_has_a_saboteur() -> None:
    assert {check for check, _, _ in SABOTEURS} | {"test_a_server_finds_and_serves_it"} == CHECKS
