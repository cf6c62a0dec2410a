"""A child's metrics: what is sent, and what waits for an answer."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from headrace.errors import InvalidArgument, Unsupported
from headrace.ipc.framing import Frame, FrameParser, Kind, ProtocolError, frame
from headrace.telemetry.series import MetricKind, MetricOperation
from headrace.workers.process.handshake import ChildKind
from headrace.workers.process.remote_services import RemoteServices, read_update, update_frame


class Server:
    """Answers calls at once with numbers from 1 on, and keeps all that it is told, in order."""

    def __init__(self) -> None:
        self.told: list[Frame] = []
        nothing = cast("Any", None)
        self.services = RemoteServices(nothing, nothing, nothing, self.refuse, self.hear)

    def hear(self, message: bytes) -> None:
        (heard,) = FrameParser().feed(message)
        self.told.append(heard)
        if heard.kind == Kind.CALL:
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
    assert [message.kind for message in server.told] == [ChildKind.UPDATE, ChildKind.UPDATE, Kind.CALL, Kind.NOTE]
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


@pytest.mark.parametrize("operation", ["increment", "set", "observe"])
@pytest.mark.parametrize("value", [0.0, -1.5, 1e308, float("inf")])
def test_an_update_of_a_metric_arrives_as_it_was(operation: MetricOperation, value: float) -> None:
    (found,) = FrameParser().feed(update_frame(2**64 - 1, operation, value))
    assert read_update(found) == (2**64 - 1, operation, value)


@pytest.mark.parametrize(("operation", "size"), [(3, 16), (65535, 16), (0, 0), (0, 8)])
def test_updates_that_make_no_sense_are_refused(operation: int, size: int) -> None:
    (sound,) = FrameParser().feed(frame(ChildKind.UPDATE, 2, bytes(16)))
    assert read_update(sound) == (0, "observe", 0.0)
    (unsound,) = FrameParser().feed(frame(ChildKind.UPDATE, operation, bytes(size)))
    with pytest.raises(ProtocolError):
        read_update(unsound)
