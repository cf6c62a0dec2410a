"""Requests and answers of one layout: decoding returns each as it was encoded, and malformed messages are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages import dtypes
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor
from headrace_processes.ipc.framing import Frame, FrameParser, Kind, ProtocolError
from headrace_processes.ipc.json_parts import json_frame
from headrace_processes.ipc.layouts import (
    MAX_LAYOUTS,
    Layout,
    LayoutReader,
    LayoutWriter,
    answer_key,
    is_plain,
    request_key,
)
from headrace_processes.ipc.tensors import INLINE

QUICK = settings(max_examples=60, deadline=None)
NUMBERS = [kind for kind in dtypes.ALL if kind is not dtypes.BYTES]
IDS = st.text(st.characters(codec="utf-8"), max_size=5)


def met(writer: LayoutWriter, request: InferRequest) -> Layout | None:
    key = request_key(request)
    layout = writer.known.get(key)
    if layout is not None or key is None:
        return layout
    return writer.layout_for_key(key, request.model_name, request.model_version, request.outputs, request.inputs)


def known(writer: LayoutWriter, request: InferRequest) -> Layout:
    """Return the layout of ``request``, as if it had been seen before."""
    met(writer, request)
    layout = met(writer, request)
    assert layout is not None
    return layout


def frames(message: bytes) -> list[Frame]:
    return list(FrameParser().feed(message))


def request(inputs: Mapping[str, Any] | None = None, **rest: Any) -> InferRequest:
    return InferRequest("model", inputs or {"x": np.zeros((1, 2), np.float32)}, **rest)


def bits(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.tobytes()


@QUICK
@given(IDS, st.integers(1, 2**63), st.sampled_from([1, 2, 3, 4]))
def test_a_lone_request_of_a_known_layout_arrives_with_its_id(id: str, first: int, columns: int) -> None:
    def sent(start: int) -> InferRequest:
        values = np.arange(start, start + columns, dtype=np.float32).reshape(1, columns)
        return request({"x": values, "y": values + 1}, id=id)

    writer, reader = LayoutWriter(), LayoutReader()
    layout = known(writer, sent(0))
    described, _ = frames(writer.requests(layout, first, [sent(0)]))
    reader.receive(described)
    (alike,) = frames(writer.requests(layout, first, [sent(7)]))
    arrived = reader.requests(alike)
    assert (arrived.first_call, list(arrived.ids)) == (first, [id] if id else [])
    assert {name: bits(each) for name, each in arrived.inputs[0].items()} == {
        name: bits(each) for name, each in sent(7).inputs.items()
    }


@QUICK
@given(
    st.lists(
        st.tuples(st.sampled_from(NUMBERS), st.lists(st.integers(1, 3), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    st.lists(IDS, min_size=1, max_size=5),
    st.integers(1, 2**63),
    st.randoms(use_true_random=False),
)
def test_requests_arrive_as_they_were(
    tensors: Sequence[tuple[dtypes.DataType, list[int]]], ids: list[str], first: int, random: Any
) -> None:
    def inputs() -> dict[str, Any]:
        found = {}
        for number, (kind, shape) in enumerate(tensors):
            size = int(np.prod(shape)) * kind.itemsize
            found[f"x{number}"] = np.frombuffer(random.randbytes(size), kind.numpy).reshape(shape)
        return found

    sent = [request(inputs(), outputs=["a", "b"], id=each, model_version="3") for each in ids]
    writer, reader = LayoutWriter(), LayoutReader()
    layout = known(writer, sent[0])
    assert all(met(writer, each) is layout for each in sent)
    described, alike = frames(writer.requests(layout, first, sent))
    assert (described.kind, alike.kind, alike.number) == (Kind.LAYOUT, Kind.ALIKE_REQUESTS, len(ids))
    assert reader.receive(described) == layout.number
    arrived = reader.requests(alike)
    assert arrived.first_call == first
    assert (list(arrived.ids) or [""] * len(ids)) == ids
    found = arrived.layout
    assert (found.model_name, found.model_version, found.outputs) == ("model", "3", ("a", "b"))
    assert [list(map(bits, each.values())) for each in arrived.inputs] == [
        list(map(bits, each.inputs.values())) for each in sent
    ]
    assert [list(each) for each in arrived.inputs] == [list(each.inputs) for each in sent]


def test_answers_to_a_batch_arrive_as_they_were() -> None:
    batch = np.arange(12, dtype=np.int16).reshape(3, 4)
    sent = [
        InferResponse({"y": batch[row : row + 1], "z": batch[row : row + 1, ::2]}, {}, "m", "1") for row in range(3)
    ]
    writer, reader = LayoutWriter(), LayoutReader()
    for each in sent[:2]:
        layout = writer.layout_for_key(answer_key(each), each.model_name, each.model_version, (), each.outputs)
    assert layout is not None
    described, alike = frames(writer.done(layout, 2**40, (1, 2, 3, 4), [each.outputs for each in sent]))
    reader.receive(described)
    arrived = reader.done(alike)
    assert (arrived.first_call, arrived.times) == (2**40, (1, 2, 3, 4))
    assert (arrived.layout.model_name, arrived.layout.model_version) == ("m", "1")
    assert [each["y"].tolist() for each in arrived.outputs] == [np.asarray(each.outputs["y"]).tolist() for each in sent]
    assert [each["z"].tolist() for each in arrived.outputs] == [np.asarray(each.outputs["z"]).tolist() for each in sent]


def test_layout_is_described_once_from_its_second_use_on() -> None:
    writer = LayoutWriter()
    assert met(writer, request()) is None
    layout = met(writer, request())
    assert layout is not None
    assert met(writer, request()) is layout
    kinds = [[each.kind for each in frames(writer.requests(layout, call, [request()]))] for call in (1, 2)]
    assert kinds == [[Kind.LAYOUT, Kind.ALIKE_REQUESTS], [Kind.ALIKE_REQUESTS]]


@pytest.mark.parametrize(
    "other",
    [
        request({"x": np.zeros((2, 1), np.float32)}),
        request({"x": np.zeros((1, 2), np.int32)}),
        request({"z": np.zeros((1, 2), np.float32)}),
        request({"x": np.zeros((1, 2), np.float32), "z": np.zeros((1, 2), np.float32)}),
        request(outputs=["y"]),
        request(model_version="1"),
    ],
    ids=["shape", "data type", "name", "inputs", "outputs", "version"],
)
def test_requests_that_differ_in_more_than_bytes_have_different_layouts(other: InferRequest) -> None:
    writer = LayoutWriter()
    assert known(writer, request()) is not known(writer, other)


@pytest.mark.parametrize(
    "tensor",
    [
        BytesTensor.from_items([b"a"], (1,)),
        np.zeros((), np.float32),
        np.zeros((0, 2), np.float32),
        np.zeros(INLINE, np.uint8),
        np.array([None]),
    ],
    ids=["strings", "no axis", "no elements", "large", "objects"],
)
def test_tensors_without_fixed_size_rows_have_no_layout(tensor: Any) -> None:
    writer = LayoutWriter()
    for _ in range(3):
        assert met(writer, request({"x": tensor})) is None
    for _ in range(3):
        assert met(writer, request({"x": np.zeros(1, np.int8), "z": tensor})) is None


@pytest.mark.parametrize(
    "rest",
    [
        {"parameters": {"a": 1}},
        {"sequence_id": 7},
        {"sequence_id": "a"},
        {"sequence_start": True},
        {"sequence_end": True},
        {"priority": 1},
        {"timeout_us": 1},
    ],
    ids=str,
)
def test_a_request_with_further_fields_is_not_plain(rest: dict[str, Any]) -> None:
    assert is_plain(request(id="a", outputs=["y"]))
    assert not is_plain(request(**rest))


def test_ever_new_shapes_do_not_grow_the_cache_and_old_layouts_stay_valid() -> None:
    writer, reader = LayoutWriter(), LayoutReader()
    first = known(writer, request())
    for frame in frames(writer.requests(first, 1, [request()]))[:1]:
        reader.receive(frame)
    highest = 0
    for size in range(3, 2 * MAX_LAYOUTS):
        layout = known(writer, request({"x": np.zeros(size, np.uint8)}))
        highest = max(highest, layout.number)
        reader.receive(frames(writer.requests(layout, size, [request({"x": np.zeros(size, np.uint8)})]))[0])
    assert highest < MAX_LAYOUTS
    assert len(writer.known) <= MAX_LAYOUTS
    assert len(reader._layouts) <= MAX_LAYOUTS
    described, alike = frames(writer.requests(first, 10**6, [request({"x": np.ones((1, 2), np.float32)})]))
    reader.receive(described)  # its number is another's by now
    (arrived,) = reader.requests(alike).inputs
    assert arrived["x"].tolist() == [[1, 1]]


# ---------------------------------------------------------------------- nonsense


def ready() -> tuple[LayoutReader, bytes]:
    """Return a reader that has a layout, and a message of two requests of it."""
    writer, reader = LayoutWriter(), LayoutReader()
    layout = known(writer, request())
    sent = [request(id="a"), request(id="bc")]
    reader.receive(frames(writer.requests(layout, 1, sent))[0])
    return reader, writer.requests(layout, 3, sent)


@pytest.mark.parametrize("at", range(0, 40, 4))
def test_a_message_of_requests_that_is_altered_is_refused_or_read_within_its_bounds(at: int) -> None:
    reader, message = ready()
    for value in (0, 1, 3, 255, 1 << 31, (1 << 32) - 1):
        altered = message[: 16 + at] + Struct("<I").pack(value) + message[20 + at :]
        damaged = frames(message)[0]._replace(body=altered)
        try:
            arrived = reader.requests(damaged)
        except ProtocolError:
            continue
        assert len(arrived.inputs) == 2
        assert len(arrived.ids) in (0, 2)


@pytest.mark.parametrize("count", [0, 1, 3, 1000, 65535])
def test_a_message_of_another_number_of_requests_is_refused(count: int) -> None:
    reader, message = ready()
    with pytest.raises(ProtocolError):
        reader.requests(frames(message)[0]._replace(number=count))


def test_a_message_of_more_answers_than_there_are_is_refused() -> None:
    writer, reader = LayoutWriter(), LayoutReader()
    answer = InferResponse({"y": np.zeros((1, 2), np.float32)}, {}, "m", "1")
    for _ in range(2):
        layout = writer.layout_for_key("key", "m", "1", (), answer.outputs)
    assert layout is not None
    described, alike = frames(writer.done(layout, 1, (1, 2, 3, 4), [answer.outputs] * 2))
    with pytest.raises(ProtocolError):
        reader.done(alike)  # of a layout that was not described
    reader.receive(described)
    assert len(reader.done(alike).outputs) == 2
    for count in (5, 60000):
        with pytest.raises(ProtocolError):
            reader.done(alike._replace(number=count))


SOUND = {
    "number": 0,
    "model_name": "m",
    "model_version": "",
    "outputs": [],
    "columns": [["x", "FP32", [1]]],
    "rows": 0,
    "callers": [],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": -1},
        {"number": MAX_LAYOUTS},
        {"number": "a"},
        {"model_name": 1},
        {"outputs": [1]},
        {"outputs": 1},
        {"rows": None},
        {"callers": [1]},
        {"callers": None},
        {"columns": []},
        {"columns": [["x", "FP32", []]]},
        {"columns": [["x", "FP32", [0]]]},
        {"columns": [["x", "FP32", [-1]]]},
        {"columns": [["x", "FP32", [1.5]]]},
        {"columns": [["x", "BYTES", [1]]]},
        {"columns": [["x", "FP31", [1]]]},
        {"columns": [[1, "FP32", [1]]]},
        {"columns": [["x", "FP32"]]},
        {"columns": None},
    ],
    ids=str,
)
def test_a_layout_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    reader = LayoutReader()
    assert reader.receive(frames(json_frame(Kind.LAYOUT, SOUND))[0]) == 0
    with pytest.raises(ProtocolError):
        reader.receive(frames(json_frame(Kind.LAYOUT, SOUND | wrong))[0])
