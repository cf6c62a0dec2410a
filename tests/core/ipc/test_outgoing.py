"""The thread that asks reads the answer itself, and no other."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import numpy as np
import pytest

from headrace.errors import HeadraceError
from headrace.ipc.channel import FramedSocket
from headrace.ipc.codec import Decoder, Encoder, reply_of
from headrace.ipc.outgoing import DirectCalls
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse


class Interruption(BaseException):
    """What the handler of a signal raises."""


def gone() -> NoReturn:
    raise AssertionError("the server's end is open")


class Ends:
    """The child's calls, and the server's end."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.line, self.server = FramedSocket(ours.detach(), gone), theirs
        self.calls = DirectCalls(self.line, Decoder(None, lambda offset: None))

    def answer(self, call: int, id: str) -> None:
        response = InferResponse({"y": np.ones(1, np.float32)}, {"id": id})
        self.server.sendall(Encoder(None).answers([reply_of(call, response, True)]))

    def ask(self, call: int) -> Any:
        """The answer, or False if it is not this line's turn."""
        request = InferRequest("other", {"x": np.ones(1, np.float32)})
        return self.calls.take_turn(request) and self.calls.ask(call, request)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with theirs:
        ends = Ends(ours, theirs)
        yield ends
    ends.line._socket.close()


def test_one_call_after_the_other_is_answered(ends: Ends) -> None:
    for call in (1, 2, 3):
        ends.answer(call, f"the {call}.")
        assert ends.ask(call).parameters["id"] == f"the {call}."


def test_a_request_that_cannot_travel_is_refused_and_the_next_is_not(ends: Ends) -> None:
    odd = InferRequest("other", {}, parameters={"k": cast("Any", object())})
    assert ends.calls.take_turn(odd)
    assert isinstance(ends.calls.ask(1, odd), HeadraceError)
    ends.answer(2, "the next")
    assert ends.ask(2).parameters["id"] == "the next"


def test_the_answer_to_an_interrupted_call_is_never_taken_for_anothers(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(buffer: memoryview) -> int:
        raise Interruption

    with monkeypatch.context() as patch:
        patch.setattr(ends.line, "_receive", interrupt)
        with pytest.raises(Interruption):
            ends.ask(1)
    ends.answer(1, "too late")
    assert ends.ask(2) is False  # then it goes another way
