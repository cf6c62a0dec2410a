"""The kind of each response of a decoupled model in the statistics. Tests with the stock clients count the rest."""

from __future__ import annotations

import pytest

from headrace.errors import Cancelled, HeadraceError, InternalError, Unavailable
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.schedulers.in_flight import AWAITED
from headrace.schedulers.response_tracker import ResponseTracker
from headrace.telemetry.response_statistics import ResponseStatistics
from tests.core.conftest import make_ticket


def counted(statistics: ResponseStatistics) -> dict[str, dict[str, int]]:
    document = statistics.document()
    return {
        index: {name: each["count"] for name, each in row.items() if each["count"]} for index, row in document.items()
    }


def entered(tracker: ResponseTracker, started_ns: int) -> tuple[Ticket, list[Answer]]:
    answers: list[Answer] = []
    ticket = make_ticket("m", respond=lambda answer, final: answers.append(answer))
    ticket.started_ns = started_ns
    tracker.open[ticket] = AWAITED
    return ticket, answers


@pytest.mark.parametrize(
    ("error", "is_cancelled", "started_ns", "expected"),
    [
        (Cancelled("gone"), True, 1, {"0": {"cancel": 1}}),
        (Cancelled("by another"), False, 1, {"0": {"fail": 1, "compute_infer": 1, "compute_output": 1}}),
        (InternalError("oh"), False, 1, {"0": {"fail": 1, "compute_infer": 1, "compute_output": 1}}),
        (Unavailable("the queue is full"), False, 0, {}),
        (Cancelled("while it waited"), True, 0, {}),
    ],
)
def test_an_error_counts_if_the_request_was_executed(
    error: HeadraceError, is_cancelled: bool, started_ns: int, expected: dict[str, dict[str, int]]
) -> None:
    statistics = ResponseStatistics()
    tracker = ResponseTracker(False, statistics)
    ticket, answers = entered(tracker, started_ns)
    ticket.cancelled = is_cancelled
    tracker.answer(ticket, error)
    assert answers == [error]
    assert counted(statistics) == {index: dict(sorted(row.items())) for index, row in expected.items()}


def test_answers_after_the_last_are_neither_counted_nor_kept() -> None:
    statistics = ResponseStatistics()
    tracker = ResponseTracker(False, statistics)
    ticket, answers = entered(tracker, 1)
    tracker.progress(ticket, InferResponse({}))
    tracker.answer(ticket, None)
    tracker.progress(ticket, InferResponse({}))
    tracker.answer(ticket, None)
    assert len(answers) == 2
    assert counted(statistics) == {
        "0": {"compute_infer": 1, "compute_output": 1, "success": 1},
        "1": {"empty_response": 1},
    }
    assert not tracker._delivered
    assert not tracker.open
