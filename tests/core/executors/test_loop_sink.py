"""Answers from threads reach the event loop in order, with one wake-up for many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.errors import Code, HeadraceError
from headrace.executors.loop_sink import LoopSink
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from tests.core.conftest import make_ticket


class RecordingScheduler:
    """A scheduler that records its notifications."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Answer]] = []

    def progress(self, ticket: Ticket, response: Answer) -> None:
        self.all.append((f"{ticket.request.id} goes on", response))

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        self.all.extend((f"{ticket.request.id} ends", answer) for ticket, answer in zip(tickets, answers, strict=True))

    def late(self, ticket: Ticket, answer: Answer) -> None:
        self.all.append((f"{ticket.request.id} was late", answer))


def ticket(id: str) -> Ticket:
    return make_ticket(id=id)


def notes_of(call: Callable[[LoopSink], object]) -> tuple[list[str], int]:
    """Return the calls to a scheduler after a thread does ``call`` before the loop's turn, and the number of
    wake-ups."""

    async def scenario() -> tuple[list[str], int]:
        loop, source, wakes = asyncio.get_running_loop(), RecordingScheduler(), 0

        class Counting:
            def call_soon_threadsafe(self, *arguments: Any) -> None:
                nonlocal wakes
                wakes += 1
                loop.call_soon_threadsafe(*arguments)

            def is_closed(self) -> bool:
                return loop.is_closed()

        sink = LoopSink(source, Counting(), source.late)  # type: ignore[arg-type]
        thread = threading.Thread(target=call, args=(sink,))
        thread.start()
        while thread.is_alive():  # without letting the loop run
            thread.join(timeout=0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [what for what, _ in source.all], wakes

    return asyncio.run(scenario())


def test_many_responses_wake_the_loop_once_and_keep_their_order() -> None:
    tickets = [ticket(str(number)) for number in range(100)]

    def send(sink: LoopSink) -> None:
        for each in tickets:
            sink.send(each, InferResponse({}), False)

    assert notes_of(send) == ([f"{number} goes on" for number in range(100)], 1)


def test_a_batch_is_delivered_after_earlier_answers() -> None:
    one = ticket("a")

    def send(sink: LoopSink) -> None:
        sink.send(one, InferResponse({}), False)
        sink.deliver([one], [None])

    assert notes_of(send)[0] == ["a goes on", "a ends"]


def test_a_batch_does_not_overtake_answers_for_which_a_thread_has_yet_to_wake_the_loop() -> None:
    async def scenario() -> list[str]:
        loop, source = asyncio.get_running_loop(), RecordingScheduler()
        is_waking, may_wake = threading.Event(), threading.Event()

        class Slow:
            def call_soon_threadsafe(self, *arguments: Any) -> None:
                if threading.current_thread() is waking:
                    is_waking.set()
                    may_wake.wait(10)
                loop.call_soon_threadsafe(*arguments)

            def is_closed(self) -> bool:
                return loop.is_closed()

        sink = LoopSink(source, Slow(), source.late)  # type: ignore[arg-type]
        waking = threading.Thread(target=sink.send, args=(ticket("a"), InferResponse({}), False))
        waking.start()

        def send() -> None:
            assert is_waking.wait(10)
            sink.send(one, InferResponse({}), False)
            sink.deliver([one], [None])

        one = ticket("b")
        await asyncio.to_thread(send)
        may_wake.set()
        await asyncio.to_thread(waking.join, 10)
        return [what for what, _ in source.all]

    assert asyncio.run(scenario()) == ["a goes on", "b goes on", "b ends"]


def test_a_last_answer_is_recorded_before_it_is_delivered() -> None:
    assert notes_of(lambda sink: sink.send(ticket("a"), None, True))[0] == ["a was late", "a ends"]


def test_answer_sent_after_the_loop_has_closed_is_dropped() -> None:
    loop, source = asyncio.new_event_loop(), RecordingScheduler()
    loop.close()
    LoopSink(source, loop, source.late).send(ticket("a"), None, True)  # type: ignore[arg-type]
    assert source.all == []


def test_a_response_is_delivered_at_once_to_a_waiting_thread_and_later_by_the_loop() -> None:
    order: list[str] = []
    one, other = ticket("a"), ticket("b")
    one.respond_at_once = lambda response: order.append(f"{response.id} at once")

    def send(sink: LoopSink) -> None:
        sink.deliver([other, one], [InferResponse({}, id="y"), InferResponse({}, id="x")])
        order.append("the thread goes on")

    assert notes_of(send)[0] == ["b ends", "a ends"]
    assert order == ["x at once", "the thread goes on"]


@pytest.mark.parametrize("answer", [None, HeadraceError("no", Code.INTERNAL)])
def test_answer_that_is_no_response_waits_for_the_loop(answer: Answer) -> None:
    one = ticket("a")
    one.respond_at_once = lambda response: pytest.fail("this was no response")
    assert notes_of(lambda sink: sink.deliver([one], [answer]))[0] == ["a ends"]


def test_a_last_response_does_not_pass_an_earlier_one() -> None:
    one = ticket("a")
    one.respond_at_once = lambda response: pytest.fail("the loop has yet to give out the first")

    def send(sink: LoopSink) -> None:
        sink.send(one, InferResponse({}), False)
        sink.deliver([one], [InferResponse({})])

    assert notes_of(send)[0] == ["a goes on", "a ends"]


def test_batch_that_ran_on_the_loop_is_delivered_at_once_after_earlier_answers() -> None:
    async def scenario() -> None:
        source = RecordingScheduler()
        sink = LoopSink(source, asyncio.get_running_loop(), source.late)  # type: ignore[arg-type]
        sink.deliver([ticket("a")], [InferResponse({})])
        sink.deliver_now([ticket("b"), ticket("c")], [InferResponse({})] * 2)
        assert [what for what, _ in source.all] == ["a ends", "b ends", "c ends"]
        await asyncio.sleep(0)
        assert len(source.all) == 3

    asyncio.run(scenario())


def test_a_batch_of_the_loop_that_cannot_be_delivered_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RecordingScheduler):
        def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
            raise SystemExit("stray")

    async def scenario() -> None:
        source = Broken()
        sink = LoopSink(source, asyncio.get_running_loop(), source.late)  # type: ignore[arg-type]
        sink.deliver_now([ticket("a")], [InferResponse({})])

    asyncio.run(scenario())
    assert "a batch could not be delivered" in caplog.text
