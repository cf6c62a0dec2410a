"""The decision table of docs/spec/behaviours.md section 6.2, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.ticket import Ticket
from headrace.schedulers.dynamic import BatchRule, Decision, decide
from tests.core.conftest import make_ticket

MS = 1_000_000


def waiting(*rows: int, since_ns: int = 0, keys: Sequence[object] | None = None) -> list[Ticket]:
    tickets = []
    for index, count in enumerate(rows):
        ticket = make_ticket(rows=count, queued_ns=since_ns)
        ticket.batch_key = keys[index] if keys else None
        tickets.append(ticket)
    return tickets


def rule(max_rows: int = 8, preferred: Sequence[int] = (), delay_ms: int = 0) -> BatchRule:
    return BatchRule(max_rows, max_rows, frozenset(preferred or (max_rows,)), delay_ms * MS)


def test_without_a_delay_the_waiting_requests_run_at_once() -> None:
    assert decide(waiting(1, 1, 1), rule(), 0).requests == 3


def test_a_batch_never_exceeds_the_maximum_and_never_splits_a_request() -> None:
    assert decide(waiting(3, 3, 3), rule(), 0).requests == 2


def test_the_largest_preferred_prefix_runs_before_the_end_of_the_delay() -> None:
    assert decide(waiting(1, 1, 1, 1, 1), rule(preferred=(2, 4), delay_ms=5), 1).requests == 4


def test_below_every_preferred_size_it_waits_for_the_rest_of_the_delay() -> None:
    assert decide(waiting(1), rule(preferred=(4,), delay_ms=5), 2 * MS) == Decision(0, 3 * MS, 3)


def test_with_a_delay_and_no_preferred_size_it_waits_for_the_maximum() -> None:
    assert decide(waiting(1, 2), rule(delay_ms=5), 0) == Decision(0, 5 * MS, 5)


def test_after_the_delay_all_waiting_requests_run() -> None:
    assert decide(waiting(1, 1, 1), rule(preferred=(2,), delay_ms=5), 5 * MS).requests == 3


def test_a_request_that_cannot_join_ends_the_batch_before_the_delay() -> None:
    assert decide(waiting(1, 1, 1, keys=("a", "a", "b")), rule(delay_ms=5), 0).requests == 2


@pytest.mark.parametrize(
    ("rows", "preferred", "since_ms", "count"),
    [
        # The batches that Triton 2.51 runs of these, with max_batch_size 8 and a delay.
        ((3,), (2, 6), 0, 0),
        ((3, 4), (2, 6), 0, 1),
        ((4,), (2, 6), 0, 0),
        ((5, 4), (2, 6), 0, 1),
        ((7,), (2, 6), 0, 1),
        ((3, 4), (2, 6), 9, 2),
        # Its rules, applied to others.
        ((3, 3), (4,), 0, 1),
        ((1, 1, 5), (2, 6), 0, 2),
        ((1, 2, 2, 1), (2, 6), 0, 4),
        ((5, 1, 1), (2,), 0, 1),
    ],
)
def test_request_that_exceeds_the_largest_preferred_size_waits_for_the_next_batch(
    rows: Sequence[int], preferred: Sequence[int], since_ms: int, count: int
) -> None:
    assert decide(waiting(*rows), rule(8, preferred, delay_ms=5), since_ms * MS).requests == count


def test_without_a_delay_a_batch_may_be_larger_than_every_preferred_size() -> None:
    assert decide(waiting(3, 4), rule(8, (2, 6)), 0).requests == 2


def test_a_model_without_batch_axis_runs_one_by_one() -> None:
    assert decide(waiting(1, 1), BatchRule(), 0).requests == 1


@pytest.mark.parametrize("delay_ms", [0, 3])
@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.integers(0, 6), st.sets(st.integers(1, 8), max_size=3))
def test_every_decision_either_sends_a_legal_prefix_or_waits_within_the_delay(
    delay_ms: int, rows: list[int], now_ms: int, preferred: set[int]
) -> None:
    decision = decide(waiting(*rows), rule(8, tuple(preferred), delay_ms), now_ms * MS)
    if decision.requests:
        assert sum(rows[: decision.requests]) <= 8
    else:
        assert 0 < decision.wait_ns <= delay_ms * MS
        assert decision.missing_rows > 0
