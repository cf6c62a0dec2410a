"""Rung 4, driven directly: the test is the instance's thread, the event loop, or the model's own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from headrace.backends.base import Call, DeferredInstance
from headrace.errors import BackendError, Cancelled, Code, HeadraceError, InvalidArgument, Unavailable
from headrace.executors.instance import run_batch, runner_for
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import LATER, Runner
from headrace.executors.warmup import complete
from headrace.messages import dtypes
from headrace.messages.response import Answer, InferResponse
from headrace.messages.spec import Spec
from headrace.messages.ticket import UNREAD, Ticket
from tests.core.conftest import make_ticket

SCHEMA = OutputSchema("m", "3", {"y": Spec("y", dtypes.FP32, (-1,)), "z": Spec("z", dtypes.FP32, (1,))}, True)


class Does(DeferredInstance):
    """An instance that handles a batch by a function of the test."""

    def __init__(self, what: Callable[[list[Call]], Any]) -> None:
        self.what = what

    def accept(self, calls: Sequence[Call]) -> Sequence[InferResponse | HeadraceError | None] | None:
        returned: Sequence[InferResponse | HeadraceError | None] | None = self.what(list(calls))
        return returned


class Seen:
    """A sink that records the answers."""

    def __init__(self) -> None:
        self.all: SimpleQueue[tuple[Ticket, Answer, bool]] = SimpleQueue()

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        self.all.put((ticket, answer, final))

    def next(self) -> tuple[Ticket, Answer, bool]:
        return self.all.get(timeout=10)


def runner_of(what: Callable[[list[Call]], Any]) -> tuple[Runner, Seen]:
    runner, seen = runner_for(Does(what), SCHEMA), Seen()
    runner.connect(seen)
    return runner, seen


def ticket(id: str = "", outputs: tuple[str, ...] = ()) -> Ticket:
    return make_ticket(outputs=outputs, id=id)


def response(value: float, **more: Any) -> InferResponse:
    return InferResponse({"y": np.full((1, 1), value, np.float32), **more})


def value(answer: object) -> float:
    assert isinstance(answer, InferResponse)
    return float(np.asarray(answer.outputs["y"])[0, 0])


def on_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_last_answers_sent_while_the_batch_is_accepted_are_returned_together() -> None:
    runner, seen = runner_of(lambda calls: [call.send(response(n)) for n, call in reversed(list(enumerate(calls)))])
    answers, times = run_batch(runner, [ticket(), ticket(), ticket()])
    assert [value(answer) for answer in answers] == [0, 1, 2]
    assert times.start_ns <= times.infer_end_ns <= times.end_ns
    assert seen.all.empty()


def test_result_of_accept_is_the_last_answer_of_each_call_without_one() -> None:
    accepted: list[Call] = []

    def accept(calls: list[Call]) -> list[Answer]:
        accepted.extend(calls)
        calls[1].send(response(1))
        return [response(0, z=np.zeros((1, 1), np.float32)), response(9), None, HeadraceError("no")]

    runner, seen = runner_of(accept)
    tickets = [ticket("7", ("z",)), ticket(), ticket(), ticket()]
    (first, sent, later, failed), _ = runner.run(tickets)
    assert isinstance(first, InferResponse)
    assert (first.model_name, first.id, list(first.outputs)) == ("m", "7", ["z"])  # signed, like answers that are sent
    assert (value(sent), later, str(failed)) == (1, LATER, "no")
    assert runner.unanswered == (tickets[2],)
    for call in (accepted[0], accepted[1], accepted[3]):
        with pytest.raises(BackendError, match="an answer after the last one"):
            call.send(response(5))
    accepted[2].send(response(2))
    assert [(request is tickets[2], value(answer)) for request, answer, _ in (seen.next(),)] == [(True, 2)]
    assert seen.all.empty()


def test_too_few_answers_fail_all_that_have_none() -> None:
    def accept(calls: list[Call]) -> list[Answer]:
        calls[0].send(response(0))
        return [response(9)]

    runner, _ = runner_of(accept)
    (sent, failed), _ = runner.run([ticket(), ticket()])
    assert value(sent) == 0
    assert isinstance(failed, BackendError)
    assert "the backend gave 1 answers for 2 requests" in failed.message


def test_request_abandoned_during_its_execution_is_answered_as_cancelled() -> None:
    abandoned = ticket()

    def accept(calls: list[Call]) -> list[Answer]:
        abandoned.abandoned = True  # the thread that handles the cancellation calls `leave` a moment later
        return [response(0), response(1)]

    runner, seen = runner_of(accept)
    (answer, other), _ = runner.run([abandoned, ticket()])
    assert isinstance(answer, Cancelled)
    assert value(other) == 1
    if abandoned.on_cancel is not None:
        abandoned.on_cancel(abandoned)
    assert seen.all.empty()


def test_a_response_that_is_being_sent_does_not_pass_the_last_answer_that_is_returned() -> None:
    """One thread is sending when ``accept`` returns: its response is sent first, or not at all."""
    sending, go_on = threading.Event(), threading.Event()
    runner, seen = runner_of(lambda calls: begin(calls[0]))
    order: list[str] = []

    def send(ticket: Ticket, answer: Answer, final: bool) -> None:
        sending.set()
        go_on.wait(10)
        order.append("a response")

    seen.send = send  # type: ignore[method-assign]

    def begin(call: Call) -> list[Answer]:
        threading.Thread(target=lambda: call.send(response(1), False), daemon=True).start()
        sending.wait(10)
        threading.Timer(0.05, go_on.set).start()
        return [response(2)]

    (answer,), _ = runner.run([ticket()])
    order.append("the last")
    assert (value(answer), order) == (2, ["a response", "the last"])


def test_an_answer_carries_model_version_and_id_and_only_the_outputs_requested() -> None:
    z = np.zeros((1, 1), np.float32)
    runner, _ = runner_of(lambda calls: calls[0].send(response(1, z=z)))
    (answer,), _ = runner.run([ticket("7", ("z",))])
    assert isinstance(answer, InferResponse)
    assert (answer.model_name, answer.model_version, answer.id, list(answer.outputs)) == ("m", "3", "7", ["z"])


def test_an_answer_after_the_batch_is_sent_to_the_sink() -> None:
    calls: list[Call] = []
    runner, seen = runner_of(calls.extend)
    early, late = ticket(), ticket()
    assert list(runner.run([early, late])[0]) == [LATER, LATER]
    on_a_thread(lambda: calls[1].send(response(1)))
    calls[0].send(response(2))
    assert [(r is late, value(a), final) for r, a, final in (seen.next(), seen.next())] == [
        (True, 1, True),
        (False, 2, True),
    ]


def test_an_answer_to_an_earlier_batch_is_not_taken_for_one_of_this() -> None:
    open_calls: list[Call] = []

    def answer_the_one_before(calls: list[Call]) -> None:
        for call in open_calls:
            call.send(response(1))
        open_calls[:] = calls

    runner, seen = runner_of(answer_the_one_before)
    first, second = ticket(), ticket()
    assert list(runner.run([first])[0]) == [LATER]
    assert list(runner.run([second])[0]) == [LATER]
    assert seen.next()[0] is first


def test_an_answer_of_another_thread_during_accept_is_sent_to_the_sink() -> None:
    runner, seen = runner_of(lambda calls: on_a_thread(lambda: calls[0].send(response(1))))
    assert list(runner.run([ticket()])[0]) == [LATER]
    assert value(seen.next()[1]) == 1


def test_responses_leave_at_once_and_in_order_before_the_end() -> None:
    def answer_all(calls: list[Call]) -> None:
        for number in range(3):
            calls[0].send(response(number), final=False)
        calls[0].send(None)

    runner, seen = runner_of(answer_all)
    assert list(runner.run([ticket()])[0]) == [None]
    assert [(value(a), final) for _, a, final in (seen.next() for _ in range(3))] == [
        (0, False),
        (1, False),
        (2, False),
    ]


def test_a_raise_ends_only_the_calls_that_have_no_last_answer() -> None:
    def half(calls: list[Call]) -> None:
        calls[0].send(response(5))
        calls[1].send(response(6), final=False)
        raise ValueError("unlucky")

    runner, _ = runner_of(half)
    answers, _ = runner.run([ticket(), ticket(), ticket()])
    assert value(answers[0]) == 5
    assert [str(answer) for answer in answers[1:]] == ["model 'm' failed to execute: ValueError: unlucky"] * 2


def test_a_raise_of_an_error_with_a_code_keeps_the_code() -> None:
    def refuse(calls: list[Call]) -> None:
        raise InvalidArgument("no")

    (answer,), _ = runner_of(refuse)[0].run([ticket()])
    assert isinstance(answer, HeadraceError)
    assert (answer.code, answer.message) == (Code.INVALID_ARGUMENT, "no")


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"q": np.zeros((1, 1), np.float32)}, "the backend returned output 'q', but the config has only ['y', 'z']"),
        ({"y": np.zeros((1, 1))}, "output 'y' is FP64, but the config says FP32"),
        ({"y": np.zeros((1, 1), complex)}, "dtype complex128 has no counterpart"),
    ],
)
def test_an_output_that_breaks_the_contract_is_an_error_of_that_request_only(
    outputs: Mapping[str, Any], text: str
) -> None:
    def answer(calls: list[Call]) -> None:
        calls[0].send(InferResponse(outputs))
        calls[1].send(response(1))

    wrong, right = runner_of(answer)[0].run([ticket(), ticket()])[0]
    assert isinstance(wrong, HeadraceError)
    assert text in wrong.message
    assert value(right) == 1


@pytest.mark.parametrize("final", [True, False])
def test_an_answer_after_the_last_is_refused_to_the_author_and_not_sent(final: bool) -> None:
    calls: list[Call] = []
    runner, seen = runner_of(calls.extend)
    runner.run([ticket()])
    calls[0].send(response(1))
    with pytest.raises(BackendError, match="model 'm': an answer after the last one"):
        calls[0].send(response(2), final)
    assert value(seen.next()[1]) == 1
    assert seen.all.empty()


def test_nothing_is_refused_as_an_answer_that_is_not_the_last() -> None:
    calls: list[Call] = []
    runner_of(calls.extend)[0].run([ticket()])
    with pytest.raises(BackendError, match="must not be None"):
        calls[0].send(None, final=False)
    calls[0].send(None)


def test_a_call_dropped_during_accept_is_answered_with_the_batch() -> None:
    runner, seen = runner_of(lambda calls: calls[0].send(response(1)))
    answers, _ = runner.run([ticket(), ticket()])
    assert str(answers[1]) == "model 'm': the backend gave no last answer"
    assert seen.all.empty()


def test_a_call_dropped_later_is_answered_once() -> None:
    calls: list[Call] = []
    runner, seen = runner_of(calls.extend)
    one = ticket()
    runner.run([one])
    assert seen.all.empty()
    calls.clear()
    answered_ticket, answer, final = seen.next()
    assert (answered_ticket is one, str(answer), final) == (True, "model 'm': the backend gave no last answer", True)
    runner.close()
    assert seen.all.empty()


def test_after_a_disconnect_responses_are_dropped_and_the_last_answer_is_cancelled() -> None:
    calls: list[Call] = []
    runner, seen = runner_of(calls.extend)
    one = ticket("a")
    runner.run([one])
    calls[0].send(response(1), final=False)
    one.cancel()
    calls[0].send(response(2), final=False)
    calls[0].send(response(3))
    assert value(seen.next()[1]) == 1
    _, answer, final = seen.next()
    assert isinstance(answer, Cancelled)
    assert final
    assert seen.all.empty()


def stopped(runner: Runner, calls: list[Call], seen: Seen) -> threading.Thread:
    """A thread that sends without end, stopped because its caller does not read."""

    def flood() -> None:
        while True:
            try:
                calls[0].send(response(0), final=False)
            except BackendError:
                return

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    for _ in range(UNREAD):
        seen.next()
    return thread


@pytest.mark.parametrize("has_responded", [False, True])
def test_a_call_that_the_model_keeps_ends_when_its_client_disconnects(has_responded: bool) -> None:
    calls: list[Call] = []
    runner, seen = runner_of(calls.extend)
    request = ticket("kept")
    assert run_batch(runner, [request])[0] == [LATER]
    if has_responded:
        calls[0].send(response(1), final=False)
        assert seen.next()[2] is False
    request.cancel()
    who, answer, final = seen.next()
    assert (who, type(answer), final) == (request, Cancelled, True)
    calls[0].send(response(2), final=False)
    calls[0].send(None)
    assert seen.all.empty()


def test_a_call_cancelled_during_accept_is_answered_once() -> None:
    request = ticket("left")

    def leave_and_answer(calls: list[Call]) -> None:
        on_a_thread(request.cancel)
        calls[0].send(response(1))

    runner, seen = runner_of(leave_and_answer)
    assert run_batch(runner, [request])[0] == [LATER]
    assert type(seen.next()[1]) is Cancelled
    assert seen.all.empty()


def test_an_unread_producer_stops_and_resumes_when_it_is_read() -> None:
    calls: list[Call] = []
    runner, seen = runner_of(calls.extend)
    one = ticket()
    runner.run([one])
    thread = stopped(runner, calls, seen)
    thread.join(0.1)
    assert seen.all.empty()
    for _ in range(10 * UNREAD):
        one.read()
    for _ in range(10 * UNREAD):
        seen.next()
    calls[0].send(None)
    thread.join(10)
    assert not thread.is_alive()


def test_closing_ends_open_calls_and_releases_a_stopped_producer() -> None:
    calls: list[Call] = []
    runner, seen = runner_of(calls.extend)
    one, answered = ticket("a"), ticket()
    runner.run([one, answered])
    calls[1].send(response(1))
    seen.next()

    def produce() -> None:
        for _ in range(UNREAD + 5):
            calls[0].send(response(0), final=False)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    for _ in range(UNREAD):
        seen.next()
    runner.close()
    answered_ticket, answer, final = seen.next()
    assert answered_ticket is one
    assert final
    assert isinstance(answer, Unavailable)
    assert answer.message == "[request id: a] model 'm' is being unloaded"
    thread.join(10)
    assert not thread.is_alive()
    assert seen.all.empty()


def test_a_call_ended_by_many_threads_is_answered_once() -> None:
    for _ in range(50):
        calls: list[Call] = []
        runner, seen = runner_of(calls.extend)
        runner.run([ticket()])
        barrier = threading.Barrier(4)

        def race(calls: list[Call] = calls, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(10)
            try:
                calls[0].send(response(1))
            except BackendError:
                return

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert seen.next()[2]
        assert seen.all.empty()


def test_completing_waits_for_late_answers_and_reads_earlier_responses() -> None:
    def later(calls: list[Call]) -> None:
        def produce() -> None:
            for number in range(3 * UNREAD):
                calls[0].send(response(number), final=False)
            calls[0].send(None)
            calls[1].send(response(-1))

        threading.Thread(target=produce, daemon=True).start()

    answers = complete(runner_for(Does(later), SCHEMA), [ticket(), ticket()])
    assert [value(answer) for answer in answers] == [3 * UNREAD - 1, -1]
