"""A child's metrics: what is sent, and what waits for an answer."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from headrace.errors import InvalidArgument, Unsupported
from headrace.telemetry.kinds import MetricKind
from headrace.workers.process.remote import RemoteServices
from headrace.workers.process.wire.frames import Frame, Frames, Kind
from headrace.workers.process.wire.updates import read_update


class Server:
    """Answers calls at once with numbers from 1 on, and keeps all that it is told, in order."""

    def __init__(self) -> None:
        self.told: list[Frame] = []
        self.services = RemoteServices(cast("Any", None), self.refuse, self.hear, cast("Any", None))

    def hear(self, message: bytes) -> None:
        (heard,) = Frames().feed(message)
        self.told.append(heard)
        if heard.kind is Kind.CALL:
            self.services.resolved({"id": json.loads(heard.text)["id"], "value": len(self.told)})

    def refuse(self, message: bytes) -> None:
        raise AssertionError("this is heard in another order than answers are")

    def metric(self, kind: MetricKind) -> int:
        """The handle of a metric of that kind."""
        buckets = [1.0] if kind == "histogram" else None
        handle = self.services.metric(self.services.metric_family("f", "", kind), {}, buckets)
        self.told.clear()
        return handle


def test_updates_wait_for_no_answer_and_go_before_whatever_comes_later() -> None:
    server = Server()
    handle = server.metric("gauge")
    server.services.update_metric(handle, "set", 2.5)
    server.services.update_metric(handle, "increment", -1)
    server.services.metric_value(handle)
    server.services.release(handle)
    assert [message.kind for message in server.told] == [Kind.UPDATE, Kind.UPDATE, Kind.CALL, Kind.NOTE]
    updates = [read_update(message) for message in server.told[:2]]
    assert updates == [(handle, "set", 2.5), (handle, "increment", -1.0)]


@pytest.mark.parametrize("value", [-1.0, -1e-300, float("nan"), float("-inf")])
def test_what_a_counter_does_not_take_is_refused_before_it_is_sent(value: float) -> None:
    server = Server()
    handle = server.metric("counter")
    with pytest.raises(InvalidArgument, match="can only be incremented monotonically by non-negative values"):
        server.services.update_metric(handle, "increment", value)
    assert server.told == []


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("counter", "set"),
        ("counter", "observe"),
        ("gauge", "observe"),
        ("histogram", "increment"),
        ("histogram", "set"),
    ],
)
def test_what_a_kind_does_not_support_is_refused_before_it_is_sent(kind: MetricKind, operation: Any) -> None:
    server = Server()
    handle = server.metric(kind)
    with pytest.raises(Unsupported, match=f"METRIC_KIND_{kind.upper()} does not support {operation.capitalize()}"):
        server.services.update_metric(handle, operation, 1)
    assert server.told == []
