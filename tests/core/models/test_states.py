"""The index and strict readiness by the states of versions (docs/spec/behaviours.md sections 5.3, 5.5 and 5.6)."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace.errors import Code, InternalError, LoadError, NotFound
from headrace.models import states
from headrace.models.served import ServedModel
from headrace.models.states import (
    IndexEntry,
    ModelRecord,
    ShutdownDeadline,
    State,
    VersionRecord,
    index_of,
    poll_failure,
    unexpected,
    versions_failure,
)


class Served:
    """The part of a `ServedModel` that a record reads."""

    def __init__(self, *, ready: bool = True, reason: str = "", can_replace_instances: bool = True) -> None:
        self.ready, self.reason, self.can_replace_instances = ready, reason, can_replace_instances


class Differs:
    """A fingerprint that differs from every other one, in instances only if ``in_instances``."""

    def __init__(self, in_instances: bool) -> None:
        self.in_instances = in_instances

    def differs_in_instances(self, other: object) -> bool:
        return self.in_instances


def version(state: State = State.READY, reason: str = "", served: Served | None = None, **more: Any) -> VersionRecord:
    return VersionRecord(state, reason, cast("ServedModel | None", served), **more)


def test_versions_are_listed_by_number() -> None:
    record = ModelRecord("m", {10: version(), 9: version(State.UNAVAILABLE, "Internal: x")})
    assert index_of(record, False) == [
        IndexEntry("m", "9", "UNAVAILABLE", "Internal: x"),
        IndexEntry("m", "10", "READY", ""),
    ]
    assert index_of(record, True) == [IndexEntry("m", "10", "READY", "")]


def test_a_model_without_versions_is_one_line() -> None:
    assert index_of(ModelRecord("m"), False) == [IndexEntry("m")]
    broken = ModelRecord("m", {1: version()}, problem="no config")
    assert index_of(broken, False) == [IndexEntry("m", "", "UNAVAILABLE", "no config")]
    assert index_of(broken, True) == index_of(ModelRecord("m"), True) == []


def test_a_version_whose_instance_restarts_is_unavailable_until_it_is_back() -> None:
    served = Served(ready=False, reason="instance 'm_0' restarts")
    record = ModelRecord("m", {1: version(served=served)})
    assert index_of(record, False) == [IndexEntry("m", "1", "UNAVAILABLE", "Unavailable: instance 'm_0' restarts")]
    assert (record.is_served, record.is_alive) == (True, False)
    served.ready = True
    assert index_of(record, True) == [IndexEntry("m", "1", "READY", "")]
    assert record.is_alive


@pytest.mark.parametrize(
    ("state", "reason", "is_settled", "has_failed"),
    [
        (State.READY, "", True, False),
        (State.UNAVAILABLE, "unloaded", True, False),
        (State.UNAVAILABLE, "Internal: x", False, True),
        (State.LOADING, "", False, False),
        (State.UNLOADING, "", False, False),
        (State.UNKNOWN, "", False, False),
    ],
)
def test_a_version_is_settled_if_it_is_ready_or_unloaded_on_purpose(
    state: State, reason: str, is_settled: bool, has_failed: bool
) -> None:
    state_of_version = version(state, reason)
    assert (state_of_version.is_settled, state_of_version.has_failed) == (is_settled, has_failed)
    assert ModelRecord("m", {1: version(), 2: state_of_version}).is_settled is is_settled
    assert not ModelRecord("m").is_settled


@pytest.mark.parametrize("is_served", [True, False])
@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("can_replace", [True, False])
@pytest.mark.parametrize("in_instances", [True, False])
def test_instances_alone_are_replaced_only_where_all_is_well(
    is_served: bool, ready: bool, can_replace: bool, in_instances: bool
) -> None:
    served = Served(ready=ready, can_replace_instances=can_replace) if is_served else None
    same, other = cast("Any", Differs(in_instances)), cast("Any", Differs(in_instances))
    record = version(served=served, fingerprint=same)
    assert record.is_still(same) is (is_served and ready)
    assert not record.is_still(other)
    assert record.wants_instances(other) is (is_served and ready and can_replace and in_instances)


def test_failures_have_tritons_words() -> None:
    assert poll_failure("m").message == "failed to load 'm', failed to poll from model repository"
    assert poll_failure("m").code is LoadError("").code
    sent = poll_failure("m", "bad", is_override=True)
    assert (sent.message.endswith("repository: bad"), sent.code) == (True, Code.INVALID_ARGUMENT)
    failed = versions_failure("m", {1: NotFound("no file"), 3: InternalError("odd")})
    assert failed.message == (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Not found: no file;\n"
        "version 3 is at UNAVAILABLE state: Internal: odd;\n"
    )


def test_an_unexpected_error_keeps_its_cause_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("odd")
    failure = unexpected(error)
    assert failure.__cause__ is error
    assert failure.code is Code.INTERNAL
    assert "unexpected error while loading" in caplog.text


def test_an_instance_may_take_four_fifths_of_the_remaining_exit_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(states, "monotonic", lambda: now[0])
    deadline = ShutdownDeadline(30)
    now[0] += 50  # the server does not stop yet
    assert deadline() == pytest.approx(24)
    deadline.stopping()
    now[0] += 10
    assert deadline() == pytest.approx(16)
    now[0] += 100
    assert deadline() == 0
