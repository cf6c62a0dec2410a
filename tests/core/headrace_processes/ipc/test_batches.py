"""Batches and their answers: sent by layout or not, they arrive as the codec alone would deliver them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidArgument
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket
from headrace_processes.ipc.batches import BatchReader, BatchWriter, DoneReader, DoneWriter
from headrace_processes.ipc.codec import Decoder, Encoder, ReceivedRequest, read_times
from headrace_processes.ipc.framing import Frame, FrameParser, Kind, ProtocolError
from headrace_processes.ipc.layouts import MAX_LAYOUTS
from headrace_processes.ipc.replies import Reply, reply_of
from tests.core.conftest import make_ticket

QUICK = settings(max_examples=150, deadline=None)
TIMES = (1, 2, 3, 2**63)


def frames(message: bytes) -> Sequence[Frame]:
    return list(FrameParser(writable=True).feed(bytearray(message)))


def decoder() -> Decoder:
    return Decoder(None, lambda offset: None)


def seen(request: ReceivedRequest) -> tuple[Any, ...]:
    """Return all fields of ``request`` that its instance can read."""
    fields = (
        "call", "model_name", "model_version", "id", "parameters", "priority", "timeout_us", "sequence_id",
        "sequence_start", "sequence_end", "caller", "decoupled", "rows", "pinned",
    )  # fmt: skip
    values = [getattr(request, name) for name in fields]
    return *values, tuple(request.outputs), tuple(request.callers), bits(request.inputs)


def bits(tensors: Mapping[str, Any]) -> list[Any]:
    return [
        (name, each.shape, bytes(each.buffer) if isinstance(each, BytesTensor) else (each.dtype, each.tobytes()))
        for name, each in tensors.items()
    ]


class Line:
    """A writer and a reader of batches, and a plain codec that gives the expected result."""

    def __init__(self) -> None:
        self.writer, self.reader = BatchWriter(Encoder(None)), BatchReader(decoder())
        self.reader.model_name, self.reader.model_version = "m", "7"
        self.kinds: list[int] = []
        self._call = 1

    def send(self, *batch: Ticket) -> Sequence[ReceivedRequest]:
        numbered = list(enumerate(batch, self._call))
        self._call += len(batch)
        requests: list[ReceivedRequest] = []
        self.kinds = []
        for message in frames(self.writer.requests(numbered)):
            requests += self.reader.receive(message)
            self.kinds.append(message.kind)
        (message,) = frames(Encoder(None).requests(numbered))
        wanted = decoder().requests(message, model_name="m", model_version="7")
        assert list(map(seen, requests)) == list(map(seen, wanted))
        return requests


def plain(value: float = 0, shape: tuple[int, ...] = (1, 4), **rest: Any) -> Ticket:
    return make_ticket("m", {"x": np.full(shape, value, np.float32)}, **rest)


def test_a_request_that_is_like_the_one_before_travels_undescribed() -> None:
    line = Line()
    kinds = []
    for value in range(4):
        line.send(plain(value))
        kinds.append(line.kinds)
    alike = [Kind.ALIKE_REQUESTS]
    assert kinds == [[Kind.REQUESTS], [Kind.LAYOUT, *alike], alike, alike]


def test_a_model_may_write_to_what_arrives() -> None:
    line = Line()
    for _ in range(3):
        (request,) = line.send(plain(1))
        request.inputs["x"][:] = 2  # type: ignore[index]


def test_requests_that_differ_in_anything_else_are_not_alike() -> None:
    line = Line()
    for value in range(4):
        for rows in (1, 2):
            for callers in ((), ("up",), ("up", "upper")):
                for outputs in ((), ("a",), ("b",)):
                    ticket = plain(value, callers=callers, outputs=outputs)
                    ticket.rows = rows
                    line.send(ticket, ticket)
    assert line.kinds == [Kind.ALIKE_REQUESTS]


TENSORS = st.sampled_from(
    [
        {"x": np.arange(4, dtype=np.float32).reshape(1, 4)},
        {"x": np.arange(8, dtype=np.float32).reshape(2, 4)},
        {"x": np.array([[1, 2, 3]], np.int8)},
        {"x": np.array([[1, 2, 3]], np.int8), "y": np.array([[1]], np.float64)},
        {"x": np.zeros((1, 0), np.float32)},
        {"x": np.array(3.0)},
        {"x": BytesTensor.from_objects(np.array([[b"a", b"bc"]], object))},
    ]
)
TICKETS = st.builds(
    lambda inputs, rows, pinned, rest: _ticket(inputs, rows, pinned, rest),
    TENSORS,
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from(
        [
            {}, {}, {}, {"id": "7"}, {"id": "é\U0001f600"}, {"outputs": ("a", "b")}, {"callers": ("up",)},
            {"callers": ("up",), "model_version": "3"}, {"parameters": {"k": 1}}, {"sequence_id": 5},
            {"priority": 2}, {"timeout_us": 9}, {"decoupled": True}, {"model_version": "3"},
        ]
    ),
)  # fmt: skip


def _ticket(inputs: Mapping[str, Any], rows: int, pinned: bool, rest: dict[str, Any]) -> Ticket:
    ticket = make_ticket("m", inputs, **rest)
    ticket.rows, ticket.pinned = rows, pinned
    return ticket


@QUICK
@given(st.lists(st.lists(TICKETS, min_size=1, max_size=4), min_size=1, max_size=8), st.integers(1, 3))
def test_whatever_is_sent_arrives_as_the_codec_has_it(batches: list[list[Ticket]], times: int) -> None:
    line = Line()
    for _ in range(times):
        for batch in batches:
            line.send(*batch)


def test_shapes_used_once_are_removed() -> None:
    line = Line()
    line.send(plain())
    line.send(plain())
    for size in range(1, MAX_LAYOUTS + 10):
        line.send(plain(shape=(1, size)))
    assert len(line.writer._known) <= MAX_LAYOUTS
    for value in range(3):
        line.send(plain(value))
    assert line.kinds == [Kind.ALIKE_REQUESTS]


# ---------------------------------------------------------------------- answers


class Back:
    """The same for the answers of batches."""

    def __init__(self) -> None:
        self.writer, self.reader = DoneWriter(Encoder(None)), DoneReader(decoder())
        self.kinds: list[int] = []

    def send(self, replies: Sequence[Reply]) -> None:
        self.kinds, done = [], None
        for message in frames(self.writer.answers(replies, TIMES)):
            self.kinds.append(message.kind)
            done = self.reader.receive(message, {})
        assert done is not None
        (message,) = frames(Encoder(None).answers(replies, TIMES))
        wanted = decoder().answers(message)
        assert done.times == read_times(message) == TIMES
        assert list(done.calls) == [reply.call for reply in wanted]
        for answer, reply in zip(done.answers, wanted, strict=True):
            assert type(answer) is type(reply.answer)
            if isinstance(answer, InferResponse) and isinstance(reply.answer, InferResponse):
                assert bits(answer.outputs) == bits(reply.answer.outputs)
                assert answer.parameters == reply.answer.parameters
                assert (answer.model_name, answer.model_version, answer.id) == ("", "", "")
            else:
                assert str(answer) == str(reply.answer)


ANSWERS = st.one_of(
    st.builds(lambda inputs: InferResponse(inputs, {}, "m", "7"), TENSORS),
    st.builds(lambda inputs: InferResponse(inputs, {"k": "v"}, "m", "7"), TENSORS),
    st.builds(lambda: InvalidArgument("no")),
    st.none(),
)


@QUICK
@given(
    st.lists(st.lists(ANSWERS, min_size=1, max_size=4), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_whatever_became_of_a_batch_arrives_as_the_codec_has_it(batches: Any, times: int, step: int) -> None:
    back = Back()
    for _ in range(times):
        for batch in batches:
            back.send([reply_of(1 + place * step, answer, True) for place, answer in enumerate(batch)])


def test_answers_that_are_like_those_before_travel_undescribed() -> None:
    back = Back()
    kinds = []
    for first in range(1, 5):
        answer = InferResponse({"y": np.full((1, 4), first, np.float32)}, {}, "m", "7")
        back.send([reply_of(call, answer, True) for call in range(first, 2 * first + 1)])
        kinds.append(back.kinds)
    alike = [Kind.ALIKE_DONE]
    assert kinds == [[Kind.DONE], [Kind.LAYOUT, *alike], alike, alike]


def test_nonsense_is_refused() -> None:
    for kind in (Kind.ALIKE_REQUESTS, Kind.ALIKE_DONE, Kind.LAYOUT):
        message = Frame(kind, 1, bytes(64), 64)
        done, batches = DoneReader(decoder()), BatchReader(decoder())
        with pytest.raises(ProtocolError):
            done.receive(message, {}) if kind == Kind.ALIKE_DONE else batches.receive(message)
