"""A thread that calls another model waits for one answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from headrace.backends.services import Services
from headrace.errors import Code, HeadraceError
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket

FIRST, SECOND = InferResponse({}, id="first"), InferResponse({}, id="second")
REFUSED = HeadraceError("no", Code.UNAVAILABLE)


def asked(answer: Callable[[Ticket], None]) -> Answer:
    """Return the result of `Services.ask` if the other model does ``answer``."""

    class Other:
        infer = staticmethod(answer)

    return Services.ask(cast("Any", Other()), InferRequest("other", {}))


@pytest.mark.parametrize("answer", [FIRST, REFUSED, None])
def test_the_last_answer_is_returned(answer: Answer) -> None:
    assert asked(lambda ticket: ticket.respond(answer, True)) is answer


def test_the_last_answer_with_content_is_returned() -> None:
    def answer(ticket: Ticket) -> None:
        ticket.respond(FIRST, False)
        ticket.respond(None, True)

    assert asked(answer) is FIRST


def test_request_answered_at_once_is_not_answered_again() -> None:
    tickets: list[Ticket] = []

    def answer(ticket: Ticket) -> None:
        tickets.append(ticket)
        assert ticket.respond_at_once is not None
        ticket.respond_at_once(FIRST)

    assert asked(answer) is FIRST
    for late in (SECOND, None):
        tickets[0].respond(late, True)  # by the event loop, later
