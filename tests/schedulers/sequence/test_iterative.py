"""Iterative sequences: a request is run again until its model has finished, beside requests that arrive meanwhile.

What runs together, and what the model is told, is what Triton 2.51 does with such a model of its Python backend; it
loses callers where one id is used twice, or END is set, who get their answers here.
"""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

from headrace import Cancelled, InferResponse, InvalidArgument, Rescheduled, Tensor, Ticket, Unavailable
from headrace.messages.response import Answer
from headrace.messages.ticket import UNREAD
from headrace_testing.stage import play

from .conftest import CONTROLS, MS, Theatre, flags_of, inputs_of, is_answered, is_null

BOTH = pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])


class Generator(Theatre):
    """The model is done with a request after as many runs as ``runs`` says of its id; 1 if nothing."""

    def __init__(self, strategy: str, rows: int = 2, instances: int = 1, more: str = "", controls: str = CONTROLS):
        super().__init__(f"{strategy} iterative_sequence: true {more}", rows, instances, controls)
        self.runs: dict[Ticket, int] = {}

    def generate(self, *names: str, runs: int = 1) -> list[Ticket]:
        """Send requests that name no sequence."""
        tickets = [self.send() for _ in names]
        self.names.update(zip(tickets, names, strict=True))
        self.runs.update(dict.fromkeys(tickets, runs))
        return tickets

    async def run_once(self, outputs: dict[str, Tensor] | None = None) -> list[list[str]]:
        """Return the batch of each instance. Then it returns the requests that run again, after a response with
        ``outputs``."""
        shown = await self.shown()
        for number, instance in enumerate(self.instances):
            if instance.batch:
                for ticket in instance.batch if outputs is not None else ():
                    self.model_queue.sources[number].progress(ticket, InferResponse(outputs or {}))
                self.give([self.outcome(ticket) for ticket in instance.batch], number)
        return shown

    def outcome(self, ticket: Ticket) -> Answer:
        self.runs[ticket] = self.runs.get(ticket, 1) - 1
        return Rescheduled() if self.runs[ticket] > 0 else InferResponse({})


@BOTH
def test_a_request_that_comes_meanwhile_joins_the_very_next_batch(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy)
        (a,) = stage.generate("a", runs=4)
        assert await stage.run_once() == [["a"]]
        assert await stage.shown() == [["a"]]
        (b,) = stage.generate("b", runs=2)
        assert await stage.run_once() == [["a"]]
        assert [sorted((await stage.run_once())[0]) for _ in range(2)] == [["a", "b"]] * 2
        assert is_answered(stage, a)
        assert is_answered(stage, b)
        assert await stage.shown() == [[]]
        assert (stage.model_queue.in_flight, stage.model_queue.pending) == (0, 0)

    play(scene)


@BOTH
def test_the_model_is_told_of_the_start_once_and_of_the_same_id_each_time(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy)
        stage.generate("a", "b", runs=3)
        seen, ids = [], set()
        for _ in range(3):
            await stage.shown()
            seen.append(sorted(flags_of(stage.instances[0].batch), key=lambda told: told[3]))
            ids.add(tuple(sorted(int(ticket.request.sequence_id) for ticket in stage.instances[0].batch)))
            await stage.run_once()
        ((first, second),) = ids
        assert 0 < first < second < 2**53  # what JSON's readers keep exactly
        assert seen == [[(1, start, 0, first), (1, start, 0, second)] for start in (1, 0, 0)]
        assert not any(ticket.request.sequence_start for ticket in stage.instances[0].given)

    play(scene)


def test_a_slot_between_two_that_iterate_is_nobodys_once_its_own_is_done() -> None:
    async def scene() -> None:
        stage = Generator("direct { }", rows=3)
        first, middle, last = stage.generate("a", "b", "c")
        stage.runs.update({first: 3, last: 3})
        assert await stage.run_once() == [["a", "b", "c"]]
        await stage.shown()
        assert [is_null(ticket) for ticket in stage.instances[0].batch] == [False, True, False]
        assert [int(inputs_of(ticket)["READY"][0][0]) for ticket in stage.instances[0].batch] == [1, 0, 1]
        stage.generate("d")
        await stage.run_once()
        assert await stage.run_once() == [["a", "d", "c"]]
        assert all(is_answered(stage, ticket) for ticket in (first, middle, last))

    play(scene)


def test_with_oldest_more_candidates_than_fit_take_turns_so_that_none_starves() -> None:
    async def scene() -> None:
        stage = Generator("oldest { max_candidate_sequences: 4 }", rows=2)
        stage.generate("a", "b", "c", "d", runs=100)
        shown = [(await stage.run_once())[0] for _ in range(6)]
        assert shown == [["a", "b"], ["c", "d"]] * 3

    play(scene)


@BOTH
def test_who_waits_for_a_slot_gets_that_of_the_first_that_is_done(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy)
        stage.generate("a", runs=2)
        stage.generate("b", runs=5)
        stage.generate("c", "d", runs=1)
        seen = [sorted({*(await stage.run_once())[0]} - {"-"}) for _ in range(5)]
        assert seen == [["a", "b"], ["a", "b"], ["b", "c"], ["b", "d"], ["b"]]
        assert all(is_answered(stage, ticket) for ticket in stage.tickets)

    play(scene)


@BOTH
def test_the_id_is_the_callers_if_he_starts_one_and_must_be_started_each_time(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy)
        (own,) = stage.ask("1S")
        stage.runs[own] = 3
        stage.generate("a", runs=3)
        await stage.shown()
        named, made = sorted(told[3] for told in flags_of(stage.instances[0].batch))
        assert named == 1 < made
        for _ in range(2):  # while it lives, and after its end
            with pytest.raises(InvalidArgument, match="for sequence 1 to model 'model' must specify the START flag"):
                stage.ask("1")
            stage.wrong.clear()
            stage.tickets.pop()
            for _ in range(3):
                await stage.run_once()
        assert is_answered(stage, own)

    play(scene)


@BOTH
@pytest.mark.parametrize("word", ["7S", "7SE"])
def test_an_id_that_is_started_twice_runs_one_after_the_other(strategy: str, word: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy)
        first, second = stage.ask(word, word)
        stage.runs = {first: 3, second: 2}
        stage.names[first], stage.names[second] = "first", "second"
        assert [await stage.run_once() for _ in range(5)] == [[["first"]]] * 3 + [[["second"]]] * 2
        assert is_answered(stage, first)
        assert is_answered(stage, second)
        assert await stage.shown() == [[]]

    play(scene)


@BOTH
def test_the_next_of_an_id_waits_though_its_instance_asks_before_the_first_is_heard_of(strategy: str) -> None:
    """As a thread may, and as one does whose model answers later."""

    async def scene() -> None:
        stage = Generator(strategy)
        first, second = stage.ask("7S", "7S")
        stage.names[first], stage.names[second] = "first", "second"
        stage.runs[first] = 3
        assert await stage.shown() == [["first"]]
        played = stage.instances[0]
        held, played.batch = played.batch, []
        played.ask()
        assert await stage.shown() == [[]]
        played.batch = held
        assert [await stage.run_once() for _ in range(4)] == [[["first"]]] * 3 + [[["second"]]]

    play(scene)


@BOTH
def test_who_says_that_it_is_the_end_too_is_run_until_the_model_is_done(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy)
        (both,) = stage.ask("7SE")
        stage.runs[both] = 3
        seen = []
        for _ in range(3):
            await stage.shown()
            seen += flags_of(stage.instances[0].batch)
            await stage.run_once()
        assert seen == [(1, 1, 1, 7), (1, 0, 0, 7), (1, 0, 0, 7)]
        assert is_answered(stage, both)

    play(scene)


@BOTH
def test_who_leaves_between_two_runs_is_run_no_more_and_his_slot_is_free(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy, rows=1)
        (gone,) = stage.generate("a", runs=100)
        (next_one,) = stage.generate("b")
        await stage.run_once()
        await stage.run_once()
        await stage.shown()
        gone.cancel()  # it runs: the model may see it, and gives it back nevertheless
        assert not stage.told(gone)
        await stage.run_once()
        assert [type(answer) for answer in stage.told(gone)] == [Cancelled]
        assert await stage.run_once() == [["b"]]
        assert is_answered(stage, next_one)
        assert stage.model_queue.in_flight == 0
        assert stage.statistics.snapshot().cancelled.count == 1

    play(scene)


def test_who_leaves_while_he_waits_for_his_next_run_is_told_at_once() -> None:
    async def scene() -> None:
        stage = Generator("oldest { max_candidate_sequences: 2 }", rows=1)
        first, second = stage.generate("a", "b", runs=100)
        await stage.run_once()
        assert await stage.shown() == [["b"]]
        first.cancel()
        assert [type(answer) for answer in stage.told(first)] == [Cancelled]
        assert [await stage.run_once() for _ in range(2)] == [[["b"]]] * 2
        assert not stage.told(second)

    play(scene)


@BOTH
def test_a_run_that_fails_ends_its_request_alone(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy)
        failing, other = stage.generate("a", "b", runs=3)
        await stage.run_once()
        await stage.shown()
        error = Unavailable("out of order")
        (joins,) = stage.generate("c")  # in the place of the one that fails
        stage.give([error if ticket is failing else stage.outcome(ticket) for ticket in stage.instances[0].batch])
        assert stage.told(failing) == [error]
        assert sorted((await stage.run_once())[0]) == ["b", "c"]
        assert is_answered(stage, other)
        assert is_answered(stage, joins)

    play(scene)


@BOTH
def test_draining_runs_what_iterates_to_its_end(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy)
        stage.generate("a", "b", runs=3)
        await stage.run_once()
        draining = asyncio.ensure_future(stage.model_queue.drain())
        await stage.settle()
        with pytest.raises(Unavailable, match="has stopped accepting new inference requests"):
            stage.generate("c")
        stage.tickets.pop()
        await stage.run_once()
        assert not draining.done()
        await stage.run_once()
        await draining
        assert all(is_answered(stage, ticket) for ticket in stage.tickets)

    play(scene)


@BOTH
def test_what_is_given_back_when_the_time_to_stop_is_over_is_told_so(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy)
        (a,) = stage.generate("a", runs=100)
        await stage.shown()
        stage.model_queue.close()
        stage.give([Rescheduled()])
        assert [type(answer) for answer in stage.told(a)] == [Unavailable]

    play(scene)


def test_the_state_goes_from_run_to_run_and_begins_anew_with_each_request() -> None:
    state = 'state { input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: [ 1 ] }'

    async def scene() -> None:
        stage = Generator("oldest { }", more=state)
        stage.model_queue._tracker._caller_reads = True
        for _ in range(2):
            (a,) = stage.generate("a", runs=3)
            seen = []
            for number in range(3):
                await stage.shown()
                (running,) = stage.instances[0].batch
                seen.append(inputs_of(running)["s"])
                await stage.run_once({"t": np.array([[number + 5]], np.int32)})
            assert seen == [[[0]], [[5]], [[6]]]
            assert [list(answer.outputs) for answer in stage.told(a) if isinstance(answer, InferResponse)] == [[]] * 4

    play(scene)


def test_a_caller_who_does_not_read_is_run_again_when_he_does_and_holds_nobody_up() -> None:
    async def scene() -> None:
        stage = Generator("oldest { max_candidate_sequences: 2 }", rows=2)
        stage.model_queue._tracker._caller_reads = True  # as of a decoupled model: callers say what they have read
        (slow,) = stage.generate("slow", runs=1000)
        for _ in range(UNREAD):
            assert await stage.run_once({}) == [["slow"]]
        assert await stage.shown() == [[]]
        stage.generate("quick")
        assert await stage.run_once() == [["quick"]]
        for _ in range(UNREAD // 2):
            assert await stage.shown() == [[]]
            slow.read()
        assert await stage.run_once({}) == [["slow"]]
        for _ in range(UNREAD // 2 - 1):
            await stage.run_once({})
        assert await stage.shown() == [[]]
        slow.cancel()
        assert isinstance(stage.told(slow)[-1], Cancelled)
        assert stage.model_queue.in_flight == 0

    play(scene)


def test_a_timeout_counts_in_the_backlog_and_not_between_runs() -> None:
    async def scene() -> None:
        stage = Generator("direct { }", rows=1)
        (a,) = stage.generate("a", runs=5)
        late = stage.send(timeout_us=10_000)
        kept = stage.send(timeout_us=50_000)
        stage.runs[kept] = 3
        await stage.run_once()
        await stage.turn(20 * MS)
        assert [type(answer) for answer in stage.told(late)] == [Unavailable]
        for _ in range(4):
            await stage.run_once()
        assert is_answered(stage, a)
        await stage.run_once()
        await stage.turn(100 * MS)
        for _ in range(2):
            await stage.run_once()
        assert is_answered(stage, kept)

    play(scene)


def test_ids_are_texts_where_the_model_takes_texts() -> None:
    async def scene() -> None:
        controls = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }'
        stage = Generator("direct { }", controls=controls)
        stage.generate("a", runs=2)
        ids = set()
        for _ in range(2):
            await stage.shown()
            (running,) = stage.instances[0].batch
            ids.add(running.request.sequence_id)
            await stage.run_once()
        (made,) = ids
        assert re.fullmatch("[0-9a-f]{32}", str(made))

    play(scene)


@BOTH
def test_nobody_can_join_a_sequence_whose_id_the_server_made(strategy: str) -> None:
    async def scene() -> None:
        stage = Generator(strategy, rows=4)
        (victim,) = stage.generate("victim", runs=6)
        await stage.run_once()
        await stage.shown()
        made = victim.request.sequence_id
        with pytest.raises(InvalidArgument, match=f"sequence id {made} of model 'model' is in use by a request that"):
            stage.ask(f"{made}S")
        stage.wrong.clear()
        stage.tickets.pop()
        guesses = stage.ask("1S", "2S", "3S")  # what the server once counted
        await stage.run_once()
        for guess in guesses:
            guess.cancel()
        for _ in range(4):
            await stage.run_once()
        assert is_answered(stage, victim)
        (late,) = stage.ask(f"{made}S")  # over: the id is free
        await stage.run_once()
        assert is_answered(stage, late)

    play(scene)


@pytest.mark.parametrize("kind", ["INT32", "UINT32", "INT64"])
def test_an_id_that_the_server_makes_is_whole_in_the_type_of_its_control(kind: str) -> None:
    async def scene() -> None:
        controls = f'control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{kind} }} }}'
        stage = Generator("direct { }", rows=16, controls=controls)
        stage.generate(*(str(number) for number in range(16)))
        await stage.shown()
        batch = stage.instances[0].batch
        assert [int(inputs_of(ticket)["ID"][0][0]) for ticket in batch] == [each.request.sequence_id for each in batch]
        await stage.run_once()

    play(scene)


@BOTH
@pytest.mark.parametrize("runs", [0, 1])
def test_who_leaves_leaves_alone_though_others_use_the_same_id(strategy: str, runs: int) -> None:
    """The caller that runs, or waits for its next run, and one behind it: the others are answered in full."""

    async def scene() -> None:
        stage = Generator(strategy)
        first, second, third, fourth = stage.ask("7S", "7S", "7S", "7S")
        stage.runs.update(dict.fromkeys((first, second, third, fourth), 3))
        for _ in range(runs):
            await stage.run_once()
        await stage.shown()
        first.cancel()
        third.cancel()
        for _ in range(8):
            await stage.run_once()
        assert [isinstance(stage.told(ticket)[-1], Cancelled) for ticket in (first, third)] == [True, True]
        assert is_answered(stage, second)
        assert is_answered(stage, fourth)
        assert stage.model_queue.scheduler.active == 0  # type: ignore[attr-defined]

    play(scene)


def test_who_leaves_or_expires_in_the_backlog_leaves_alone_though_others_use_the_same_id() -> None:
    async def scene() -> None:
        stage = Generator("direct { }", rows=1)
        (running,) = stage.generate("a", runs=3)
        await stage.run_once()
        gone, *_ = stage.ask("7S")
        (late,) = stage.ask("7S", timeout_us=10_000)
        (kept,) = stage.ask("7S")
        gone.cancel()
        await stage.turn(20 * MS)
        assert isinstance(stage.told(late)[-1], Unavailable)
        for _ in range(4):
            await stage.run_once()
        assert is_answered(stage, running)
        assert is_answered(stage, kept)
        (last,) = stage.ask("7S", timeout_us=10_000)
        stage.generate("b")
        await stage.run_once()
        await stage.run_once()
        assert is_answered(stage, last)

    play(scene)
