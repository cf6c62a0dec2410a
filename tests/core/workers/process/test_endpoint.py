"""What the server takes from a child, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.ipc.codec import Decoder, Encoder
from headrace.ipc.framing import FrameParser, ProtocolError
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace.workers.process.endpoint import ServiceEndpoint
from headrace.workers.process.remote_services import update_frame


@pytest.fixture
def hear() -> Callable[[bytes], None]:
    """Has an endpoint, whose child holds nothing, hear a message."""
    endpoint = ServiceEndpoint(cast("Any", SimpleNamespace(submit=None, cancel=None)), "m")
    endpoint.open(Encoder(None), Decoder(None, lambda offset: None), lambda message: None, {})

    def hear(message: bytes) -> None:
        for heard in FrameParser().feed(message):
            endpoint.hear(heard, lambda reply: None)

    return hear


@pytest.mark.parametrize("handle", [0, 1, 2**64 - 1])
def test_a_child_cannot_change_a_metric_that_it_does_not_hold(hear: Callable[[bytes], None], handle: int) -> None:
    with pytest.raises(ProtocolError, match=f"metric {handle}, which the child does not hold"):
        hear(update_frame(handle, "increment", 1.0))


# ---------------------------------------------------------------------- requests to other models


class Asked:
    """An endpoint with one request of its child's, and all that was sent to answer it."""

    def __init__(self, at_once: bool) -> None:
        self.sent: list[tuple[str, int]] = []
        self.submitted: list[Ticket] = []
        self._at_once = at_once
        self.endpoint = ServiceEndpoint(cast("Any", self), "m")
        self.endpoint.open(Encoder(None), Decoder(None, lambda offset: None), lambda message: None, {})
        request = InferRequest("other", {"x": np.ones(1, np.float32)})
        (heard,) = FrameParser().feed(Encoder(None).request(5, request))
        self.endpoint.hear(heard, self.send, self.send_at_once)

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
        """What is sent when the request is answered."""
        (ticket,) = self.submitted
        assert ticket.respond_at_once is not None
        response = InferResponse({"y": np.ones(1, np.float32)})
        if at_once:
            ticket.respond_at_once(response)
        ticket.respond(response, True)
        return self.sent


def test_an_answer_that_was_sent_at_once_is_not_sent_again() -> None:
    assert Asked(at_once=True).answer(at_once=True) == [("at once", 5)]


def test_an_answer_that_could_not_be_sent_at_once_is_sent_by_the_loop() -> None:
    assert Asked(at_once=False).answer(at_once=True) == [("by the loop", 5)]


def test_an_answer_that_nobody_had_at_once_is_sent_by_the_loop() -> None:
    assert Asked(at_once=True).answer(at_once=False) == [("by the loop", 5)]


def test_what_is_answered_at_once_is_no_longer_the_childs_to_cancel() -> None:
    asked = Asked(at_once=True)
    asked.answer(at_once=True)
    asked.endpoint.close()
    assert not asked.submitted[0].cancelled


def test_nothing_is_sent_to_a_child_that_is_gone() -> None:
    asked = Asked(at_once=False)
    asked.endpoint.close()
    assert asked.answer(at_once=True) == []
