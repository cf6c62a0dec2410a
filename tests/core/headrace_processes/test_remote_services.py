"""Calls of a child to its server, and the messages that the server accepts from a child."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.errors import InvalidArgument, Unsupported
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace.telemetry.series import MetricKind, MetricOperation
from headrace_processes.handshake import ChildKind
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.framing import Frame, FrameParser, Kind, ProtocolError, frame
from headrace_processes.ipc.json_parts import json_frame
from headrace_processes.remote_services import MAX_TIMES, RemoteServices, ServiceEndpoint, read_update, update_frame


class Server:
    """Answers calls at once with numbers from 1 on, and records all messages in order."""

    def __init__(self) -> None:
        self.received: list[Frame] = []
        nothing = cast("Any", None)
        self.services = RemoteServices(nothing, nothing, nothing, self.refuse, self.receive)

    def receive(self, message: bytes) -> None:
        (heard,) = FrameParser().feed(message)
        self.received.append(heard)
        if heard.kind == Kind.CALL:
            self.services.resolved({"id": json.loads(heard.text)["id"], "value": len(self.received)})

    def refuse(self, message: bytes) -> None:
        raise AssertionError("this is heard in another order than answers are")

    def metric(self, kind: MetricKind) -> int:
        """The handle of a metric of that kind."""
        buckets = [1.0] if kind == "histogram" else None
        handle = self.services.metric(self.services.metric_family("f", "", kind), {}, buckets)
        self.received.clear()
        return handle


def test_updates_wait_for_no_answer_and_precede_later_messages() -> None:
    server = Server()
    handle = server.metric("gauge")
    server.services.update_metric(handle, "set", 2.5)
    server.services.update_metric(handle, "increment", -1)
    server.services.metric_value(handle)
    server.services.release(handle)
    assert [message.kind for message in server.received] == [ChildKind.UPDATE, ChildKind.UPDATE, Kind.CALL, Kind.NOTE]
    updates = [read_update(message) for message in server.received[:2]]
    assert updates == [(handle, "set", 2.5, 1), (handle, "increment", -1.0, 1)]


def test_many_equal_updates_are_few_messages() -> None:
    server = Server()
    handle = server.metric("histogram")
    server.services.update_metric(handle, "observe", 2.5, MAX_TIMES + 3)
    updates = [read_update(message) for message in server.received]
    assert updates == [(handle, "observe", 2.5, MAX_TIMES), (handle, "observe", 2.5, 3)]


@pytest.mark.parametrize("value", [-1.0, -1e-300, float("nan"), float("-inf")])
def test_invalid_value_of_a_counter_is_refused_before_it_is_sent(value: float) -> None:
    server = Server()
    handle = server.metric("counter")
    with pytest.raises(InvalidArgument, match="can only be incremented monotonically by non-negative values"):
        server.services.update_metric(handle, "increment", value)
    assert server.received == []


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
def test_unsupported_operation_of_a_metric_is_refused_before_it_is_sent(kind: MetricKind, operation: Any) -> None:
    server = Server()
    handle = server.metric(kind)
    with pytest.raises(Unsupported, match=f"METRIC_KIND_{kind.upper()} does not support {operation.capitalize()}"):
        server.services.update_metric(handle, operation, 1)
    assert server.received == []


@pytest.mark.parametrize("operation", ["increment", "set", "observe"])
@pytest.mark.parametrize("value", [0.0, -1.5, 1e308, float("inf")])
def test_an_update_of_a_metric_arrives_as_it_was(operation: MetricOperation, value: float) -> None:
    (frame,) = FrameParser().feed(update_frame(2**64 - 1, operation, value, 7))
    assert read_update(frame) == (2**64 - 1, operation, value, 7)


@pytest.mark.parametrize(
    ("operation", "body"), [(3, bytes(20)), (65535, bytes(20)), (0, b""), (0, bytes(8)), (2, bytes(16) + b"\xff" * 4)]
)
def test_updates_that_make_no_sense_are_refused(operation: int, body: bytes) -> None:
    (sound,) = FrameParser().feed(frame(ChildKind.UPDATE, 2, bytes(20)))
    assert read_update(sound) == (0, "observe", 0.0, 0)
    (unsound,) = FrameParser().feed(frame(ChildKind.UPDATE, operation, body))
    with pytest.raises(ProtocolError):
        read_update(unsound)


# ---------------------------------------------------------------------- what the server takes


@pytest.fixture
def receive() -> Callable[[bytes], None]:
    """Send a message to an endpoint whose child holds nothing."""
    endpoint = ServiceEndpoint(cast("Any", SimpleNamespace(submit=None, cancel=None)), "m")
    endpoint.open(Encoder(None), Decoder(None, lambda offset: None), lambda message: None, {})

    def receive(message: bytes) -> None:
        for heard in FrameParser().feed(message):
            endpoint.receive(heard, lambda reply: None)

    return receive


@pytest.mark.parametrize("handle", [0, 1, 2**64 - 1])
def test_a_child_cannot_change_a_metric_that_it_does_not_hold(receive: Callable[[bytes], None], handle: int) -> None:
    with pytest.raises(ProtocolError, match=f"metric {handle}, which the child does not hold"):
        receive(update_frame(handle, "increment", 1.0))


# ---------------------------------------------------------------------- requests to other models


class EndpointCall:
    """An endpoint with one request of its child's, and all that was sent to answer it."""

    def __init__(self, at_once: bool) -> None:
        self.sent: list[tuple[str, int]] = []
        self.submitted: list[Ticket] = []
        self._at_once = at_once
        self.endpoint = ServiceEndpoint(cast("Any", self), "m")
        self.endpoint.open(Encoder(None), Decoder(None, lambda offset: None), lambda message: None, {})
        request = InferRequest("other", {"x": np.ones(1, np.float32)})
        (heard,) = FrameParser().feed(Encoder(None).request(5, request))
        self.endpoint.receive(heard, self.send, self.send_at_once)

    def submit(self, ticket: Ticket) -> None:
        self.submitted.append(ticket)

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancel()

    def send(self, message: bytes) -> None:
        (heard,) = FrameParser().feed(message)
        (reply,) = Decoder(None, lambda offset: None).answers(heard)
        self.sent.append(("by the loop", reply.call))

    def send_at_once(self, call: int, response: InferResponse) -> bool:
        if self._at_once:
            self.sent.append(("at once", call))
        return self._at_once

    def answer(self, *, at_once: bool) -> list[tuple[str, int]]:
        """Return the message that is sent when the request is answered."""
        (ticket,) = self.submitted
        assert ticket.respond_at_once is not None
        response = InferResponse({"y": np.ones(1, np.float32)})
        if at_once:
            ticket.respond_at_once(response)
        ticket.respond(response, True)
        return self.sent


def test_an_answer_that_was_sent_at_once_is_not_sent_again() -> None:
    assert EndpointCall(at_once=True).answer(at_once=True) == [("at once", 5)]


def test_an_answer_that_could_not_be_sent_at_once_is_sent_by_the_loop() -> None:
    assert EndpointCall(at_once=False).answer(at_once=True) == [("by the loop", 5)]


def test_an_answer_without_a_waiting_thread_is_sent_by_the_loop() -> None:
    assert EndpointCall(at_once=True).answer(at_once=False) == [("by the loop", 5)]


def test_answered_request_is_no_longer_cancelled_with_its_child() -> None:
    call = EndpointCall(at_once=True)
    call.answer(at_once=True)
    call.endpoint.close()
    assert not call.submitted[0].cancelled


def test_nothing_is_sent_to_a_child_that_has_exited() -> None:
    call = EndpointCall(at_once=False)
    call.endpoint.close()
    assert call.answer(at_once=True) == []


def test_a_call_of_a_child_that_has_exited_creates_no_metric() -> None:
    made: list[str] = []

    def family(name: str, description: str, kind: MetricKind) -> int:
        made.append(name)
        return 1

    async def scenario() -> None:
        endpoint = ServiceEndpoint(cast("Any", SimpleNamespace(submit=None, cancel=None, metric_family=family)), "m")
        endpoint.open(Encoder(None), Decoder(None, lambda offset: None), lambda message: None, {})
        call = {"id": 1, "method": "metric_family", "arguments": ["requests", "", "counter"]}
        for heard in FrameParser().feed(json_frame(Kind.CALL, call)):
            endpoint.receive(heard, lambda reply: None)
        endpoint.close()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert made == []
