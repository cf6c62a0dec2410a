"""Iterative sequences: a request runs again until its model has finished, together with new requests.

Batches and controls equal those of Triton 2.51 with its Python backend. Triton never answers some requests if an id is
used twice or END is set. Here, they are answered.
"""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

from headrace import Cancelled, InferResponse, InvalidArgument, Rescheduled, Tensor, Ticket, Unavailable
from headrace.messages.response import Answer
from headrace.messages.ticket import UNREAD
from headrace_testing.simulator import run_scenario

from .conftest import CONTROLS, MS, SequenceSimulator, flags_of, inputs_of, is_answered, is_null

BOTH = pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])


class Generator(SequenceSimulator):
    """The model answers a request after ``runs`` of it (default: 1)."""

    def __init__(self, strategy: str, rows: int = 2, instances: int = 1, more: str = "", controls: str = CONTROLS):
        super().__init__(f"{strategy} iterative_sequence: true {more}", rows, instances, controls)
        self.runs: dict[Ticket, int] = {}

    def generate(self, *names: str, runs: int = 1) -> list[Ticket]:
        """Send requests without a sequence id."""
        tickets = [self.send() for _ in names]
        self.names.update(zip(tickets, names, strict=True))
        self.runs.update(dict.fromkeys(tickets, runs))
        return tickets

    async def run_once(self, outputs: dict[str, Tensor] | None = None) -> list[list[str]]:
        """Return the batch of each instance, then end it: answer or reschedule each request.

        Before that, each request gets a response with ``outputs``, if they are given.
        """
        running = await self.running()
        for number, instance in enumerate(self.instances):
            if instance.batch:
                for ticket in instance.batch if outputs is not None else ():
                    self.model_queue.sources[number].progress(ticket, InferResponse(outputs or {}))
                self.respond([self.outcome(ticket) for ticket in instance.batch], number)
        return running

    def outcome(self, ticket: Ticket) -> Answer:
        self.runs[ticket] = self.runs.get(ticket, 1) - 1
        return Rescheduled() if self.runs[ticket] > 0 else InferResponse({})


@BOTH
def test_a_new_request_joins_the_next_batch(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy)
        (a,) = simulator.generate("a", runs=4)
        assert await simulator.run_once() == [["a"]]
        assert await simulator.running() == [["a"]]
        (b,) = simulator.generate("b", runs=2)
        assert await simulator.run_once() == [["a"]]
        assert [sorted((await simulator.run_once())[0]) for _ in range(2)] == [["a", "b"]] * 2
        assert is_answered(simulator, a)
        assert is_answered(simulator, b)
        assert await simulator.running() == [[]]
        assert (simulator.model_queue.in_flight, simulator.model_queue.pending) == (0, 0)

    run_scenario(scenario)


@BOTH
def test_the_model_gets_start_once_and_the_same_id_each_time(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy)
        simulator.generate("a", "b", runs=3)
        seen, ids = [], set()
        for _ in range(3):
            await simulator.running()
            seen.append(sorted(flags_of(simulator.instances[0].batch), key=lambda flags: flags[3]))
            ids.add(tuple(sorted(int(ticket.request.sequence_id) for ticket in simulator.instances[0].batch)))
            await simulator.run_once()
        ((first, second),) = ids
        assert 0 < first < second < 2**53  # what JSON's readers keep exactly
        assert seen == [[(1, start, 0, first), (1, start, 0, second)] for start in (1, 0, 0)]
        assert not any(ticket.request.sequence_start for ticket in simulator.instances[0].received)

    run_scenario(scenario)


def test_a_finished_slot_between_two_iterating_ones_is_empty() -> None:
    async def scenario() -> None:
        simulator = Generator("direct { }", rows=3)
        first, middle, last = simulator.generate("a", "b", "c")
        simulator.runs.update({first: 3, last: 3})
        assert await simulator.run_once() == [["a", "b", "c"]]
        await simulator.running()
        assert [is_null(ticket) for ticket in simulator.instances[0].batch] == [False, True, False]
        assert [int(inputs_of(ticket)["READY"][0][0]) for ticket in simulator.instances[0].batch] == [1, 0, 1]
        simulator.generate("d")
        await simulator.run_once()
        assert await simulator.run_once() == [["a", "d", "c"]]
        assert all(is_answered(simulator, ticket) for ticket in (first, middle, last))

    run_scenario(scenario)


def test_with_oldest_no_candidate_starves() -> None:
    async def scenario() -> None:
        simulator = Generator("oldest { max_candidate_sequences: 4 }", rows=2)
        simulator.generate("a", "b", "c", "d", runs=100)
        shown = [(await simulator.run_once())[0] for _ in range(6)]
        assert shown == [["a", "b"], ["c", "d"]] * 3

    run_scenario(scenario)


@BOTH
def test_a_waiting_sequence_gets_the_first_freed_slot(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy)
        simulator.generate("a", runs=2)
        simulator.generate("b", runs=5)
        simulator.generate("c", "d", runs=1)
        seen = [sorted({*(await simulator.run_once())[0]} - {"-"}) for _ in range(5)]
        assert seen == [["a", "b"], ["a", "b"], ["b", "c"], ["b", "d"], ["b"]]
        assert all(is_answered(simulator, ticket) for ticket in simulator.tickets)

    run_scenario(scenario)


@BOTH
def test_an_id_of_the_caller_must_be_started_each_time(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy)
        (own,) = simulator.send_words("1S")
        simulator.runs[own] = 3
        simulator.generate("a", runs=3)
        await simulator.running()
        named, generated_id = sorted(flags[3] for flags in flags_of(simulator.instances[0].batch))
        assert named == 1 < generated_id
        for _ in range(2):  # while it lives, and after its end
            with pytest.raises(InvalidArgument, match="for sequence 1 to model 'model' must specify the START flag"):
                simulator.send_words("1")
            simulator.violations.clear()
            simulator.tickets.pop()
            for _ in range(3):
                await simulator.run_once()
        assert is_answered(simulator, own)

    run_scenario(scenario)


@BOTH
@pytest.mark.parametrize("word", ["7S", "7SE"])
def test_two_starts_of_an_id_run_one_after_the_other(strategy: str, word: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy)
        first, second = simulator.send_words(word, word)
        simulator.runs = {first: 3, second: 2}
        simulator.names[first], simulator.names[second] = "first", "second"
        assert [await simulator.run_once() for _ in range(5)] == [[["first"]]] * 3 + [[["second"]]] * 2
        assert is_answered(simulator, first)
        assert is_answered(simulator, second)
        assert await simulator.running() == [[]]

    run_scenario(scenario)


@BOTH
def test_the_next_request_of_an_id_waits_until_the_first_is_answered(strategy: str) -> None:
    """As a thread may do, and a model that answers later."""

    async def scenario() -> None:
        simulator = Generator(strategy)
        first, second = simulator.send_words("7S", "7S")
        simulator.names[first], simulator.names[second] = "first", "second"
        simulator.runs[first] = 3
        assert await simulator.running() == [["first"]]
        instance = simulator.instances[0]
        batch, instance.batch = instance.batch, []
        instance.poll()
        assert await simulator.running() == [[]]
        instance.batch = batch
        assert [await simulator.run_once() for _ in range(4)] == [[["first"]]] * 3 + [[["second"]]]

    run_scenario(scenario)


@BOTH
def test_a_request_with_start_and_end_runs_until_the_model_is_done(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy)
        (both,) = simulator.send_words("7SE")
        simulator.runs[both] = 3
        seen = []
        for _ in range(3):
            await simulator.running()
            seen += flags_of(simulator.instances[0].batch)
            await simulator.run_once()
        assert seen == [(1, 1, 1, 7), (1, 0, 0, 7), (1, 0, 0, 7)]
        assert is_answered(simulator, both)

    run_scenario(scenario)


@BOTH
def test_a_request_cancelled_between_runs_frees_its_slot(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy, rows=1)
        (cancelled,) = simulator.generate("a", runs=100)
        (next_one,) = simulator.generate("b")
        await simulator.run_once()
        await simulator.run_once()
        await simulator.running()
        cancelled.cancel()  # it runs: the model may check for it, but reschedules it
        assert not simulator.answers_to(cancelled)
        await simulator.run_once()
        assert [type(answer) for answer in simulator.answers_to(cancelled)] == [Cancelled]
        assert await simulator.run_once() == [["b"]]
        assert is_answered(simulator, next_one)
        assert simulator.model_queue.in_flight == 0
        assert simulator.statistics.snapshot().cancelled.count == 1

    run_scenario(scenario)


def test_a_request_cancelled_while_it_waits_for_its_next_run_is_answered_at_once() -> None:
    async def scenario() -> None:
        simulator = Generator("oldest { max_candidate_sequences: 2 }", rows=1)
        first, second = simulator.generate("a", "b", runs=100)
        await simulator.run_once()
        assert await simulator.running() == [["b"]]
        first.cancel()
        assert [type(answer) for answer in simulator.answers_to(first)] == [Cancelled]
        assert [await simulator.run_once() for _ in range(2)] == [[["b"]]] * 2
        assert not simulator.answers_to(second)

    run_scenario(scenario)


@BOTH
def test_a_failed_run_ends_only_its_request(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy)
        failing, other = simulator.generate("a", "b", runs=3)
        await simulator.run_once()
        await simulator.running()
        error = Unavailable("out of order")
        (joins,) = simulator.generate("c")  # in the place of the one that fails
        simulator.respond(
            [error if ticket is failing else simulator.outcome(ticket) for ticket in simulator.instances[0].batch]
        )
        assert simulator.answers_to(failing) == [error]
        assert sorted((await simulator.run_once())[0]) == ["b", "c"]
        assert is_answered(simulator, other)
        assert is_answered(simulator, joins)

    run_scenario(scenario)


@BOTH
def test_draining_runs_iterating_requests_to_their_end(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy)
        simulator.generate("a", "b", runs=3)
        await simulator.run_once()
        draining = asyncio.ensure_future(simulator.model_queue.drain())
        await simulator.settle()
        with pytest.raises(Unavailable, match="has stopped accepting new inference requests"):
            simulator.generate("c")
        simulator.tickets.pop()
        await simulator.run_once()
        assert not draining.done()
        await simulator.run_once()
        await draining
        assert all(is_answered(simulator, ticket) for ticket in simulator.tickets)

    run_scenario(scenario)


@BOTH
def test_a_request_rescheduled_after_the_drain_is_unavailable(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy)
        (a,) = simulator.generate("a", runs=100)
        await simulator.running()
        simulator.model_queue.close()
        simulator.respond([Rescheduled()])
        assert [type(answer) for answer in simulator.answers_to(a)] == [Unavailable]

    run_scenario(scenario)


def test_the_state_passes_between_runs_and_restarts_with_each_request() -> None:
    state = 'state { input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: [ 1 ] }'

    async def scenario() -> None:
        simulator = Generator("oldest { }", more=state)
        simulator.model_queue._tracker._caller_reads = True
        for _ in range(2):
            (a,) = simulator.generate("a", runs=3)
            seen = []
            for number in range(3):
                await simulator.running()
                (running,) = simulator.instances[0].batch
                seen.append(inputs_of(running)["s"])
                await simulator.run_once({"t": np.array([[number + 5]], np.int32)})
            assert seen == [[[0]], [[5]], [[6]]]
            assert [
                list(answer.outputs) for answer in simulator.answers_to(a) if isinstance(answer, InferResponse)
            ] == [[]] * 4

    run_scenario(scenario)


def test_a_caller_that_does_not_read_is_paused_and_blocks_nobody() -> None:
    async def scenario() -> None:
        simulator = Generator("oldest { max_candidate_sequences: 2 }", rows=2)
        simulator.model_queue._tracker._caller_reads = True  # as of a decoupled model: callers report their reads
        (slow,) = simulator.generate("slow", runs=1000)
        for _ in range(UNREAD):
            assert await simulator.run_once({}) == [["slow"]]
        assert await simulator.running() == [[]]
        simulator.generate("quick")
        assert await simulator.run_once() == [["quick"]]
        for _ in range(UNREAD // 2):
            assert await simulator.running() == [[]]
            slow.read()
        assert await simulator.run_once({}) == [["slow"]]
        for _ in range(UNREAD // 2 - 1):
            await simulator.run_once({})
        assert await simulator.running() == [[]]
        slow.cancel()
        assert isinstance(simulator.answers_to(slow)[-1], Cancelled)
        assert simulator.model_queue.in_flight == 0

    run_scenario(scenario)


def test_a_timeout_counts_in_the_backlog_and_not_between_runs() -> None:
    async def scenario() -> None:
        simulator = Generator("direct { }", rows=1)
        (a,) = simulator.generate("a", runs=5)
        late = simulator.send(timeout_us=10_000)
        survivor = simulator.send(timeout_us=50_000)
        simulator.runs[survivor] = 3
        await simulator.run_once()
        await simulator.advance(20 * MS)
        assert [type(answer) for answer in simulator.answers_to(late)] == [Unavailable]
        for _ in range(4):
            await simulator.run_once()
        assert is_answered(simulator, a)
        await simulator.run_once()
        await simulator.advance(100 * MS)
        for _ in range(2):
            await simulator.run_once()
        assert is_answered(simulator, survivor)

    run_scenario(scenario)


def test_ids_are_texts_if_the_control_is_a_string() -> None:
    async def scenario() -> None:
        controls = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }'
        simulator = Generator("direct { }", controls=controls)
        simulator.generate("a", runs=2)
        ids = set()
        for _ in range(2):
            await simulator.running()
            (running,) = simulator.instances[0].batch
            ids.add(running.request.sequence_id)
            await simulator.run_once()
        (generated_id,) = ids
        assert re.fullmatch("[0-9a-f]{32}", str(generated_id))

    run_scenario(scenario)


@BOTH
def test_no_request_joins_a_sequence_with_a_generated_id(strategy: str) -> None:
    async def scenario() -> None:
        simulator = Generator(strategy, rows=4)
        (victim,) = simulator.generate("victim", runs=6)
        await simulator.run_once()
        await simulator.running()
        generated_id = victim.request.sequence_id
        with pytest.raises(
            InvalidArgument, match=f"sequence id {generated_id} of model 'model' is in use by a request that"
        ):
            simulator.send_words(f"{generated_id}S")
        simulator.violations.clear()
        simulator.tickets.pop()
        guesses = simulator.send_words("1S", "2S", "3S")  # what the server once counted
        await simulator.run_once()
        for guess in guesses:
            guess.cancel()
        for _ in range(4):
            await simulator.run_once()
        assert is_answered(simulator, victim)
        (late,) = simulator.send_words(f"{generated_id}S")  # over: the id is free
        await simulator.run_once()
        assert is_answered(simulator, late)

    run_scenario(scenario)


@pytest.mark.parametrize("kind", ["INT32", "UINT32", "INT64"])
def test_a_generated_id_fits_the_type_of_its_control(kind: str) -> None:
    async def scenario() -> None:
        controls = f'control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{kind} }} }}'
        simulator = Generator("direct { }", rows=16, controls=controls)
        simulator.generate(*(str(number) for number in range(16)))
        await simulator.running()
        batch = simulator.instances[0].batch
        assert [int(inputs_of(ticket)["ID"][0][0]) for ticket in batch] == [each.request.sequence_id for each in batch]
        await simulator.run_once()

    run_scenario(scenario)


@BOTH
@pytest.mark.parametrize("runs", [0, 1])
def test_a_cancellation_affects_no_other_request_of_the_id(strategy: str, runs: int) -> None:
    """The caller that runs, or waits for its next run, and one behind it: the others are answered in full."""

    async def scenario() -> None:
        simulator = Generator(strategy)
        first, second, third, fourth = simulator.send_words("7S", "7S", "7S", "7S")
        simulator.runs.update(dict.fromkeys((first, second, third, fourth), 3))
        for _ in range(runs):
            await simulator.run_once()
        await simulator.running()
        first.cancel()
        third.cancel()
        for _ in range(8):
            await simulator.run_once()
        assert [isinstance(simulator.answers_to(ticket)[-1], Cancelled) for ticket in (first, third)] == [True, True]
        assert is_answered(simulator, second)
        assert is_answered(simulator, fourth)
        assert simulator.model_queue.scheduler.active == 0  # type: ignore[attr-defined]

    run_scenario(scenario)


def test_a_cancellation_or_timeout_in_the_backlog_affects_no_other_request_of_the_id() -> None:
    async def scenario() -> None:
        simulator = Generator("direct { }", rows=1)
        (running,) = simulator.generate("a", runs=3)
        await simulator.run_once()
        cancelled, *_ = simulator.send_words("7S")
        (late,) = simulator.send_words("7S", timeout_us=10_000)
        (survivor,) = simulator.send_words("7S")
        cancelled.cancel()
        await simulator.advance(20 * MS)
        assert isinstance(simulator.answers_to(late)[-1], Unavailable)
        for _ in range(4):
            await simulator.run_once()
        assert is_answered(simulator, running)
        assert is_answered(simulator, survivor)
        (last,) = simulator.send_words("7S", timeout_us=10_000)
        simulator.generate("b")
        await simulator.run_once()
        await simulator.run_once()
        assert is_answered(simulator, last)

    run_scenario(scenario)
