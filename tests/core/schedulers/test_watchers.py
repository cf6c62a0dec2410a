"""The watchers of a request: what each answer passes between the model and the caller."""

from __future__ import annotations

import ast
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import Cancelled, Unavailable
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket, Watcher
from headrace.schedulers.in_flight import AWAITED, InFlightTracker, call_watchers

ROOT = Path(__file__).parents[3]


class Caller:
    """A request, and what its caller gets."""

    def __init__(self) -> None:
        self.got: list[tuple[Answer, bool]] = []
        self.ticket = Ticket(InferRequest("m", {}, id="7"), lambda answer, final: self.got.append((answer, final)))
        self.tracker = InFlightTracker(caller_reads=True)
        self.tracker.open[self.ticket] = AWAITED


def noting(seen: list[str], name: str) -> Watcher:
    def watcher(ticket: Ticket, answer: Answer, final: bool) -> Answer:
        seen.append(f"{name} {ticket.request.id} {final}")
        return answer

    return watcher


def test_each_answer_passes_the_watchers_from_the_model_to_the_caller() -> None:
    caller, seen = Caller(), list[str]()
    for name in ("outer", "inner"):
        caller.ticket.watch(noting(seen, name))
    first, last = InferResponse({}), InferResponse({})
    caller.tracker.progress(caller.ticket, first)
    caller.tracker.answer(caller.ticket, last)
    assert seen == ["inner 7 False", "outer 7 False", "inner 7 True", "outer 7 True"]
    assert caller.got == [(first, False), (last, True)]


def test_result_of_a_watcher_is_passed_on() -> None:
    caller, seen = Caller(), list[Answer]()
    reason = Unavailable("the quota is used up")
    caller.ticket.watch(lambda ticket, answer, final: seen.append(answer) or answer)  # type: ignore[func-returns-value]
    caller.ticket.watch(lambda ticket, answer, final: reason)
    caller.tracker.answer(caller.ticket, InferResponse({}))
    assert (seen, caller.got) == ([reason], [(reason, True)])


def test_a_watcher_that_raises_is_logged_and_the_others_and_the_caller_get_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caller, seen, answer = Caller(), list[str](), InferResponse({})

    def failing(ticket: Ticket, answer: Answer, final: bool) -> Answer:
        raise SystemExit("tired")

    for watcher in (noting(seen, "outer"), failing, noting(seen, "inner")):
        caller.ticket.watch(watcher)
    caller.tracker.answer(caller.ticket, answer)
    assert seen == ["inner 7 True", "outer 7 True"]
    assert caller.got == [(answer, True)]
    assert "a watcher failed at an answer of model 'm'" in caplog.text


def test_requests_that_are_abandoned_pass_their_watchers() -> None:
    caller, seen = Caller(), list[str]()
    caller.ticket.watch(noting(seen, "only"))
    caller.tracker.abandon("Server is stopping")
    assert seen == ["only 7 True"]


def test_the_last_answer_frees_the_watchers_without_the_collector() -> None:
    caller = Caller()

    class Heavy:
        def __call__(self, ticket: Ticket, answer: Answer, final: bool) -> Answer:
            return answer

    heavy = Heavy()
    left = weakref.ref(heavy)
    caller.ticket.watch(heavy)
    del heavy
    gc.disable()
    try:
        caller.tracker.answer(caller.ticket, InferResponse({}))
        assert left() is None
    finally:
        gc.enable()


def test_a_refusal_passes_only_the_watchers_that_were_added() -> None:
    """An earlier watcher reports by itself: the request may be submitted again."""
    caller, seen = Caller(), list[str]()
    caller.ticket.watch(noting(seen, "before"))
    caller.ticket.watch(noting(seen, "since"))
    refusal = Cancelled("no")
    assert call_watchers(caller.ticket, refusal, True, skip=1) is refusal
    assert seen == ["since 7 True"]
    assert call_watchers(caller.ticket, refusal, True) is refusal
    assert seen == ["since 7 True", "before 7 True"]


def _assigned(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "respond" and isinstance(node.ctx, ast.Store):
            yield node.lineno


def test_nothing_replaces_the_callback_of_a_ticket() -> None:
    sources = [
        path
        for part in ("core", "backends", "schedulers", "caches", "frontends")
        for path in ROOT.glob(f"{part}/**/src/**/*.py")
    ]
    assignments = [(path.name, line) for path in sources for line in _assigned(ast.parse(path.read_text()))]
    assert [name for name, _ in assignments] == ["ticket.py"], assignments
