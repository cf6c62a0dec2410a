"""Callers that are made when something reads them."""

from __future__ import annotations

import pytest

from headrace import Caller, Operation
from headrace_hosts.permitted import PermittedCaller


def test_it_is_made_once_when_it_is_read() -> None:
    made = []

    def make() -> Caller:
        made.append(1)
        return Caller("http", "127.0.0.1", header={"x": "1", "traceparent": "00-1"}.get, deadline_ns=5)

    caller: Caller = PermittedCaller(make, "alice", "m")
    assert made == []
    assert (caller.principal, caller.operation, caller.model) == ("alice", Operation.INFER, "m")
    assert (caller.transport, caller.peer, caller.header("x"), caller.deadline_ns) == ("http", "127.0.0.1", "1", 5)
    assert caller.trace_context == {"traceparent": "00-1"}
    assert made == [1]
    called = Caller("model", parent=caller)
    assert (called.principal, called.deadline_ns, called.trace_context) == ("alice", 5, {"traceparent": "00-1"})
    assert caller.for_another_operation().principal == "alice"
    caller.end()
    assert caller.is_over
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        caller.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert made == [1]


def test_a_name_that_it_has_not_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(PermittedCaller(lambda: Caller("grpc"), "alice", "m"), "nothing")  # noqa: B009
