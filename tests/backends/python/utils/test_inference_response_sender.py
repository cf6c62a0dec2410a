"""The response sender; the texts are Triton's (docs/spec/behaviours.md section 9.4)."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from headrace.errors import Code, HeadraceError
from headrace.messages.response import InferResponse
from triton_python_backend_utils.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends.python.utils.conftest import Recorded

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
DECOUPLED = Runtime("counted", decoupled=True)
PLAIN = Runtime("counted")


def response(number: int) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number]))])


def numbers(call: Recorded) -> list[int | None]:
    """Return the values of each answer; None for an end without outputs."""
    return [int(a.outputs["y"][0]) if isinstance(a, InferResponse) else None for a, _ in call.answers]  # type: ignore[index]


def received(call: Recorded, runtime: Runtime) -> pb_utils.InferenceRequest:
    return pb_utils.InferenceRequest._received(call, runtime)


def test_decoupled_model_sends_any_number_and_an_end(recorded: type[Recorded]) -> None:
    call = recorded()
    sender = received(call, DECOUPLED).get_response_sender()

    sender.send(response(1))
    sender.send(response(2))
    sender.send(flags=FINAL)

    assert numbers(call) == [1, 2, None]
    assert [final for _, final in call.answers] == [False, False, True]


def test_last_response_may_carry_the_end(recorded: type[Recorded]) -> None:
    call = recorded()
    received(call, DECOUPLED).get_response_sender().send(response(1), FINAL)

    assert call.ended
    assert numbers(call) == [1]


def test_plain_model_has_one_response_and_may_end_it_again(recorded: type[Recorded]) -> None:
    call = recorded()
    sender = received(call, PLAIN).get_response_sender()

    sender.send(response(1))
    assert call.ended
    sender.send(flags=FINAL)

    assert numbers(call) == [1]


@pytest.mark.parametrize(
    ("runtime", "before", "send", "text"),
    [
        (
            DECOUPLED,
            [],
            (None, 0),
            "Inference Response object must be provided when the response flags is set to zero.",
        ),
        (DECOUPLED, [], (None, 4), "Unable to send response. Unsupported flag provided."),
        (DECOUPLED, [FINAL], (1, 0), "Unable to send response. Response sender has been closed."),
        (DECOUPLED, [FINAL], (None, FINAL), "Unable to send response. Response sender has been closed."),
        (
            PLAIN,
            [],
            (None, FINAL),
            "Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
        ),
        (PLAIN, [0], (2, 0), "Unable to send response. Non-decoupled model cannot send more than one response."),
        (PLAIN, [FINAL], (2, 0), "Unable to send response. Non-decoupled model cannot send more than one response."),
        (PLAIN, [FINAL], (None, FINAL), "Unable to send response. Response sender has been closed."),
    ],
)
def test_invalid_sends_are_refused(
    runtime: Runtime, before: list[int], send: tuple[int | None, int], text: str, recorded: type[Recorded]
) -> None:
    call = recorded()
    sender = received(call, runtime).get_response_sender()
    for flags in before:
        sender.send(response(1), flags)
    answers = list(call.answers)

    number, flags = send
    with pytest.raises(pb_utils.TritonModelException) as refusal:
        sender.send(None if number is None else response(number), flags)

    assert str(refusal.value) == text
    assert call.answers == answers


def test_a_response_of_another_type_is_refused(recorded: type[Recorded]) -> None:
    sender = received(recorded(), DECOUPLED).get_response_sender()
    with pytest.raises(TypeError, match="found type 'list'"):
        sender.send([])  # type: ignore[arg-type]


def test_a_request_has_one_sender(recorded: type[Recorded]) -> None:
    request = received(recorded(), PLAIN)
    assert request.get_response_sender() is request.get_response_sender()


def test_error_is_sent_with_its_code(recorded: type[Recorded]) -> None:
    call = recorded()
    error = pb_utils.TritonError("no such user", pb_utils.TritonError.NOT_FOUND)
    received(call, DECOUPLED).get_response_sender().send(pb_utils.InferenceResponse(error=error), FINAL)

    ((answer, final),) = call.answers
    assert isinstance(answer, HeadraceError)
    assert (str(answer), answer.code, final) == ("no such user", Code.NOT_FOUND, True)


def test_request_that_a_decoupled_model_drops_is_ended(recorded: type[Recorded]) -> None:
    call = recorded()
    request = received(call, DECOUPLED)
    sender = request.get_response_sender()
    sender.send(response(1))

    del request
    assert not call.ended
    del sender
    assert call.answers[1:] == [(None, True)]


def test_a_request_that_a_decoupled_model_ignores_is_ended(recorded: type[Recorded]) -> None:
    call = recorded()
    request = received(call, DECOUPLED)
    del request
    assert call.answers == [(None, True)]


def test_a_dropped_sender_of_a_plain_model_is_an_error(recorded: type[Recorded]) -> None:
    call = recorded()
    sender = received(call, PLAIN).get_response_sender()
    del sender

    ((answer, final),) = call.answers
    assert final
    assert isinstance(answer, HeadraceError)
    assert str(answer) == "model 'counted' released the response sender without a response"


def test_dropping_a_request_without_a_sender_answers_nothing(recorded: type[Recorded]) -> None:
    call = recorded()
    request = received(call, PLAIN)
    del request
    assert call.answers == []


def test_request_is_finished_once_and_its_sender_refuses_from_then_on(recorded: type[Recorded]) -> None:
    for runtime in (DECOUPLED, PLAIN):
        call = recorded()
        request = received(call, runtime)
        failure = HeadraceError("execute raised")

        assert request._finish(failure)
        assert not request._finish(failure)
        with pytest.raises(pb_utils.TritonModelException, match="Response sender has been closed"):
            request.get_response_sender().send(response(1))
        del request

        assert call.answers == [(failure, True)]


def test_finish_does_not_answer_twice(recorded: type[Recorded]) -> None:
    call = recorded()
    request = received(call, PLAIN)
    request.get_response_sender().send(response(1))

    assert not request._finish(HeadraceError("late"))
    assert numbers(call) == [1]


@pytest.mark.parametrize("by", ["sender", "instance"])
def test_end_neither_waits_for_a_blocked_answer_nor_overtakes_it(by: str, recorded: type[Recorded]) -> None:
    call = recorded()
    call.gate = threading.Event()
    request = received(call, DECOUPLED)
    sender = request.get_response_sender()
    end: dict[str, Callable[[], object]] = {
        "sender": lambda: sender.send(flags=FINAL),
        "instance": lambda: request._finish(None),
    }
    blocked = threading.Thread(target=sender.send, args=(response(1),))
    blocked.start()
    assert call.began.wait(20)

    end[by]()
    assert call.answers == []
    call.gate.set()
    blocked.join(20)

    assert numbers(call) == [1, None]
    assert call.ended


def test_the_end_is_last_if_threads_send_and_end_at_once(recorded: type[Recorded]) -> None:
    for _ in range(50):
        call = recorded()
        sender = received(call, DECOUPLED).get_response_sender()
        start = threading.Barrier(5)

        def send(
            flags: int, sender: pb_utils.InferenceResponseSender = sender, start: threading.Barrier = start
        ) -> None:
            start.wait(20)
            with contextlib.suppress(pb_utils.TritonModelException):
                for number in range(5):
                    sender.send(response(number), flags)

        threads = [threading.Thread(target=send, args=(flags,)) for flags in (0, 0, 0, FINAL, FINAL)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

        assert [final for _, final in call.answers].count(True) == 1
        assert call.ended


def test_sender_and_request_report_a_disconnected_client(recorded: type[Recorded]) -> None:
    call = recorded()
    request = received(call, DECOUPLED)
    sender = request.get_response_sender()
    assert not sender.is_cancelled()
    assert not request.is_cancelled()

    call.ticket.cancel()

    assert sender.is_cancelled()
    assert request.is_cancelled()
    sender.send(response(1))
    sender.send(flags=FINAL)
