"""Exactly one answer, however many a model sends."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import HeadraceError, InternalError, InvalidArgument
from headrace.messages.response import Answer, InferResponse
from headrace.messages.single import AwaitedAnswer, SingleAnswer
from tests.core.conftest import make_ticket

ONE, TWO = InferResponse({}), InferResponse({})
FIRST, SECOND = InvalidArgument("first"), InvalidArgument("second")


class RecordedAnswer(SingleAnswer):
    def __init__(self) -> None:
        super().__init__()
        self.settled: list[InferResponse | HeadraceError] = []

    def settle(self, answer: InferResponse | HeadraceError) -> None:
        self.settled.append(answer)


def settled(*answers: Answer) -> list[InferResponse | HeadraceError]:
    """Return the single answer to ``answers``, of which the last is final."""
    kept = RecordedAnswer()
    for answer in answers[:-1]:
        kept(answer, False)
        assert kept.settled == []
    kept(answers[-1], True)
    return kept.settled


@pytest.mark.parametrize("answers", [(ONE,), (ONE, None)])
def test_one_response_is_the_answer_with_or_without_the_final_flag(answers: tuple[Answer, ...]) -> None:
    assert settled(*answers) == [ONE]


@pytest.mark.parametrize(("answers", "count"), [((None,), 0), ((ONE, TWO), 2), ((ONE, TWO, None), 2)])
def test_any_other_number_of_responses_is_an_error_in_tritons_words(answers: tuple[Answer, ...], count: int) -> None:
    (answer,) = settled(*answers)
    assert isinstance(answer, InternalError)
    assert answer.message == f"expected a single response, got {count}"


@pytest.mark.parametrize("answers", [(FIRST,), (FIRST, None), (ONE, FIRST), (FIRST, ONE), (FIRST, SECOND)])
def test_the_first_error_takes_precedence(answers: tuple[Answer, ...]) -> None:
    assert settled(*answers) == [FIRST]


def test_an_awaited_answer_is_returned_or_raised() -> None:
    async def ask(answer: Answer) -> InferResponse:
        awaited = AwaitedAnswer()
        ticket = make_ticket("m", {}, awaited)
        asyncio.get_running_loop().call_soon(ticket.respond, answer, True)
        return await awaited.to(ticket)

    assert asyncio.run(ask(ONE)) is ONE
    with pytest.raises(InvalidArgument, match="first"):
        asyncio.run(ask(FIRST))


def test_cancelled_wait_cancels_the_request_which_may_still_be_answered() -> None:
    async def leave() -> bool:
        awaited = AwaitedAnswer()
        ticket = make_ticket("m", {}, awaited)
        waiting = asyncio.ensure_future(awaited.to(ticket))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        ticket.respond(FIRST, True)
        return ticket.cancelled

    assert asyncio.run(leave())
