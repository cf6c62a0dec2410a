"""A record of each answer: its fields, and the parts of the request that it references."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace import Code, HeadraceError, InferRequest, InferResponse, Ticket, Unavailable
from headrace.messages.response import Answer
from headrace_hosts.answering import ResponseWriter
from headrace_hosts.recorded import RECORDED, Recorded, principal_of


class Plain(ResponseWriter[str]):
    def encode(self, response: InferResponse, loop_limit_bytes: int) -> str:
        return "encoded"

    def refused(self, error: HeadraceError) -> str:
        return f"refused: {error.message}"


class Noted(Recorded, Plain):
    __slots__ = RECORDED

    def __init__(self, sent: list[str], made: list[Any]) -> None:
        self._answer, self._count = None, 0
        self.view, self.send = SimpleNamespace(name="m", version=1), sent.append  # type: ignore[assignment]
        self.recorder = SimpleNamespace(add=made.append)
        self.origin = ("what is known before",)


def answered(answer: Answer, leaves: bool = False) -> tuple[list[str], list[Any]]:
    sent: list[str] = []
    made: list[Any] = []
    noted = Noted(sent, made)
    noted.ticket = ticket = Ticket(InferRequest("m", {}), noted)
    ticket.queued_ns, ticket.times = 5, (1, 2, 3, 4)
    if leaves:
        ticket.cancel()
    noted(answer, True)
    return sent, made


@pytest.mark.parametrize(
    ("answer", "leaves", "sent", "outcome"),
    [
        (InferResponse({"y": np.zeros(7, np.uint8)}), False, "encoded", (None, 7)),
        (Unavailable("busy"), False, "refused: busy", (Code.UNAVAILABLE, 0)),
        (InferResponse({}), True, "encoded", (Code.CANCELLED, 0)),
    ],
    ids=["a response", "an error", "a response to nobody"],
)
def test_the_record_says_how_it_ended(
    answer: Answer, leaves: bool, sent: str, outcome: tuple[Code | None, int]
) -> None:
    found, ((origin, code, size, ended_ns, queued_ns, times),) = answered(answer, leaves)
    assert found == [sent]
    assert (origin, (code, size), queued_ns, times) == ("what is known before", outcome, 5, (1, 2, 3, 4))
    assert ended_ns > 5


def test_nothing_is_kept_when_it_is_answered() -> None:
    gc.collect()
    gc.disable()
    try:
        noted, sent = Noted([], []), np.ones(2, np.float32)
        noted.ticket, input_ref = Ticket(InferRequest("m", {"x": sent}), noted), weakref.ref(sent)
        noted.refuse(Unavailable("busy"))
        del noted, sent
        assert input_ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("subject", "others", "name"),
    [
        (((("organizationName", "x"), ("commonName", "alice")), (("commonName", "bob"),)), (), "alice"),
        (((("commonName", "alice"),),), (("URI", "spiffe://x/y"),), "alice"),
        (((("commonName", ""),),), (("DNS", "x.y"), ("URI", "spiffe://x/y")), "spiffe://x/y"),
        ((), (("IP Address", "::1"), ("DNS", "x.y"), ("DNS", "z")), "x.y"),
        ((), (), ""),
    ],
)
def test_a_certificate_names_the_principal(subject: object, others: object, name: str) -> None:
    assert principal_of({"subject": subject, "subjectAltName": others}) == name
