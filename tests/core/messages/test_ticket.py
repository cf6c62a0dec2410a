"""A request never changes; the state of its execution is in its ticket."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields
from typing import Any

import pytest

from headrace.messages.request import InferRequest
from headrace.messages.ticket import Ticket
from headrace_processes.ipc.codec import ReceivedRequest

FIELDS = [field.name for field in fields(InferRequest) if field.init]


class FreedObject:
    """An object that a request refers to, which records when it is freed."""


def ticket_for(request: InferRequest) -> Ticket:
    return Ticket(request, lambda answer, final: None)


@pytest.mark.parametrize("kind", [InferRequest, ReceivedRequest])
def test_the_type_checker_refuses_an_assignment_to_a_request(kind: type[InferRequest]) -> None:
    assert [field.name for field in fields(kind) if not str(field.type).startswith("Final[")] == [
        "_deadline_ns",
        "_sender",
        "_execution",
    ]


@pytest.mark.parametrize("name", FIELDS)
def test_tests_refuse_an_assignment_to_a_request(name: str) -> None:
    request = InferRequest("m", {})
    with pytest.raises(AttributeError, match="never changes"):
        setattr(request, name, getattr(request, name))


def test_an_altered_request_differs_only_in_the_altered_field() -> None:
    fields: dict[str, Any] = {name: object() for name in FIELDS}
    request = InferRequest(**fields)
    for name in ("inputs", "outputs", "parameters"):
        other: Any = object()
        altered = getattr(request, f"with_{name}")(other)
        assert {each: getattr(altered, each) for each in FIELDS} == {**fields, name: other, "alike": None}


def test_a_request_has_its_cancellation_during_and_after_its_execution() -> None:
    left, stayed = ticket_for(InferRequest("m", {})), ticket_for(InferRequest("m", {}))
    assert not left.request.cancelled
    for ticket in (left, stayed):
        assert ticket.begin() is ticket.request
    left.cancel()
    assert [ticket.request.cancelled for ticket in (left, stayed)] == [True, False]
    for ticket in (left, stayed):
        ticket.end()
    assert [ticket.request.cancelled for ticket in (left, stayed)] == [True, False]


def test_a_request_that_was_executed_is_freed_with_its_ticket() -> None:
    tensor = FreedObject()
    input_ref = weakref.ref(tensor)
    ticket = ticket_for(InferRequest("m", {"x": tensor}))  # type: ignore[dict-item]
    ticket.begin()
    ticket.end()
    gc.disable()
    try:
        del tensor, ticket
        assert input_ref() is None
    finally:
        gc.enable()


def test_a_request_has_the_deadline_of_those_for_whom_it_was_sent_and_keeps_its_own() -> None:
    first = InferRequest("a", {})
    second = InferRequest("b", {}, caller=first)
    third = InferRequest("c", {}, caller=second)
    assert third.deadline_ns == 0
    first.expire_at(50)
    assert (first.deadline_ns, second.deadline_ns, third.deadline_ns) == (50, 50, 50)
    second.expire_at(40)
    assert (first.deadline_ns, third.deadline_ns) == (50, 40)
    for altered in (second.with_inputs({}), second.with_outputs(["y"]), second.with_timeout(3)):
        assert altered.deadline_ns == 40
    assert second.with_timeout(3).timeout_us == 3
