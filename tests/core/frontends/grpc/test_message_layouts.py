"""Requests that are laid out like one before mean what they would mean if none had come before."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.frontends.grpc import decode as plain
from headrace.frontends.grpc import wire
from headrace.frontends.grpc.grpc_service_pb2 import ModelInferRequest
from headrace.frontends.grpc.message_layouts import MessageLayoutCache
from headrace.frontends.recognition import TensorPlace
from headrace.messages.request import InferRequest
from headrace.messages.tensor import BytesTensor

FIELDS = ("model_name", "model_version", "id", "priority", "timeout_us")
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


def nobody(answer: Any, final: bool) -> None:
    raise AssertionError("nothing is answered here")


def message(
    value: float = 1.0, shape: tuple[int, ...] = (1, 4), datatype: str = "FP32", model: str = "m", **parameters: Any
) -> bytes:
    sent = ModelInferRequest(model_name=model)
    sent.inputs.add(name="x", datatype=datatype, shape=shape)
    sent.raw_input_contents.append(np.full(shape, value, np.float32).tobytes())
    for name, given_value in parameters.items():
        if name == "id":
            sent.id = given_value
        elif isinstance(given_value, bool):
            sent.parameters[name].bool_param = given_value
        elif isinstance(given_value, int):
            sent.parameters[name].int64_param = given_value
        else:
            sent.parameters[name].string_param = given_value
    return sent.SerializeToString()


def said(request: InferRequest) -> tuple[Any, ...]:
    """Everything that a frontend fills in, for comparing."""
    tensors = [
        (name, tensor.shape, bytes(tensor.buffer))
        if isinstance(tensor, BytesTensor)
        else (name, getattr(tensor, "datatype", None), tensor.shape, bytes(getattr(tensor, "buffer", b"")))
        if not isinstance(tensor, np.ndarray)
        else (name, tensor.dtype.str, tensor.shape, tensor.tobytes())
        for name, tensor in request.inputs.items()
    ]
    plain_fields = [getattr(request, name) for name in FIELDS + SEQUENCE]
    return (tensors, tuple(request.outputs), dict(request.parameters), *plain_fields)


def outcome(known: MessageLayoutCache | None, body: bytes | memoryview) -> tuple[Any, ...]:
    """What ``body`` asks for, or why it is refused; without ``known``, by protobuf alone."""
    try:
        unpack, decode = (wire.unpack, plain.decode) if known is None else (known.unpack, known.decode)
        decoded = decode(unpack(body))
    except (HeadraceError, DecodeError) as error:
        return type(error), str(error)
    return (*said(decoded.request), dict(decoded.classes), decoded.empty_final)


def places(known: MessageLayoutCache, body: bytes) -> Sequence[TensorPlace]:
    """Where the tensors of ``body`` lie, if its layout is known."""
    try:
        layout = known.unpack(body).layout
    except DecodeError:
        layout = None
    return layout.layout.places if layout else ()


def is_known(known: MessageLayoutCache, body: bytes) -> bool:
    return bool(places(known, body))


@pytest.fixture
def known() -> MessageLayoutCache:
    return MessageLayoutCache()


def learned(known: MessageLayoutCache, body: bytes) -> bool:
    """Whether the layout of ``body`` is known once it has been decoded."""
    outcome(known, body)
    return is_known(known, body)


def test_other_values_in_a_known_layout_are_not_parsed_and_arrive(known: MessageLayoutCache) -> None:
    assert learned(known, message(1))
    request = known.decode(known.unpack(message(7))).request
    assert is_known(known, message(7))
    np.testing.assert_array_equal(np.asarray(request.inputs["x"]), np.full((1, 4), 7, np.float32))
    assert request.model_name == "m"


def test_a_large_message_in_a_view_is_known_too(known: MessageLayoutCache) -> None:
    first, second = message(1, (1, 40_000)), message(2, (1, 40_000))
    assert learned(known, first)
    raw_request = known.unpack(memoryview(second))
    assert raw_request.layout is not None
    tensor = known.decode(raw_request).request.inputs["x"]
    assert isinstance(tensor, np.ndarray)
    assert tensor.tobytes() == np.full(40_000, 2, np.float32).tobytes()
    assert np.shares_memory(tensor, np.frombuffer(second, np.uint8)), "the tensor was copied"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(message(model="n"), id="another model"),
        pytest.param(message(shape=(2, 2)), id="another shape of that size"),
        pytest.param(message(datatype="INT32"), id="another data type of that size"),
        pytest.param(message()[:-1], id="truncated"),
        pytest.param(message() + b"\x0a\x01n", id="a second name behind the tensors"),
        pytest.param(message(priority=1), id="a parameter"),
    ],
)
def test_what_differs_outside_the_tensors_is_not_taken_for_a_known_layout(
    known: MessageLayoutCache, other: bytes
) -> None:
    assert learned(known, message())
    assert not is_known(known, other)
    assert outcome(known, other) == outcome(None, other)


LONG = "a_model_with_a_name_that_fills_what_layouts_are_looked_up_by"


@pytest.mark.parametrize(
    ("first", "other"),
    [
        pytest.param(message(model=LONG), message(model=LONG, shape=(2, 2)), id="a shape"),
        pytest.param(message(model=LONG), message(model=LONG[:-1] + "Y"), id="the end of a name"),
        pytest.param(message() + b"\x0a\x01n", message() + b"\x0a\x01o", id="what comes behind the tensors"),
    ],
)
def test_layouts_of_one_size_and_one_beginning_are_told_apart(
    known: MessageLayoutCache, first: bytes, other: bytes
) -> None:
    assert len(first) == len(other)
    assert learned(known, first)
    assert not is_known(known, other)
    assert outcome(known, other) == outcome(None, other)
    assert is_known(known, other), "the latest is kept"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(message(id="7"), id="an id"),
        pytest.param(message(sequence_id=3), id="a sequence"),
        pytest.param(message(sequence_start=True), id="the start of a sequence alone"),
        pytest.param(message(sequence_end=True), id="the end of a sequence alone"),
        pytest.param(message(shape=(0,)), id="no elements"),
        pytest.param(message(datatype="BYTES"), id="strings"),
        pytest.param(message(note="n" * 1100), id="more than tensors"),
    ],
)
def test_requests_of_which_none_like_it_comes_again_are_not_kept(known: MessageLayoutCache, body: bytes) -> None:
    assert not learned(known, body)
    assert outcome(known, body) == outcome(None, body)


def test_parameters_priority_and_outputs_are_those_of_the_layout(known: MessageLayoutCache) -> None:
    sent = ModelInferRequest.FromString(message(priority=2, timeout=30, color="red"))
    sent.outputs.add(name="y").parameters["classification"].int64_param = 3
    body = sent.SerializeToString(deterministic=True)
    assert learned(known, body)
    assert outcome(known, body) == outcome(None, body)
    request = known.decode(known.unpack(body)).request
    assert (request.priority, request.timeout_us, request.parameters) == (2, 30, {"color": "red"})


def test_each_request_has_parameters_of_its_own(known: MessageLayoutCache) -> None:
    body = message(color="red")
    first = known.decode(known.unpack(body)).request
    second = known.decode(known.unpack(body)).request
    for request in (first, second):
        request.parameters["color"] = "blue"  # type: ignore[index]  # as a careless model would
    assert known.decode(known.unpack(body)).request.parameters == {"color": "red"}


def test_forwarded_metadata_is_added_to_each_request_and_never_kept(known: MessageLayoutCache) -> None:
    known.decode(known.unpack(message()), {"user": "a"})
    assert not is_known(known, message())
    assert learned(known, message())
    decoded = known.decode(known.unpack(message()), {"user": "b"})
    assert decoded.request.parameters == {"user": "b"}
    assert known.decode(known.unpack(message())).request.parameters == {}


def test_the_number_of_layouts_is_bounded(known: MessageLayoutCache) -> None:
    bodies = [message(shape=(1, size)) for size in range(1, 2500)]
    for body in bodies:
        outcome(known, body)
    assert 0 < sum(is_known(known, body) for body in bodies) <= 1024


def test_a_layout_keeps_nothing_of_the_request_that_it_was_learned_from(known: MessageLayoutCache) -> None:
    large = message(3, (1, 10_000))
    assert learned(known, large)
    raw_request = known.unpack(large)
    assert raw_request.message.ByteSize() < 100
    assert not raw_request.message.raw_input_contents


# ------------------------------------------------------------------ by protobuf alone, the same

INPUTS = st.lists(
    st.tuples(st.sampled_from("xyz"), st.sampled_from(["FP32", "INT32", "UINT8", "BYTES", "FP128"]),
              st.sampled_from([(1, 2), (2,), (0,), (4,), ()])),
    max_size=3,
)  # fmt: skip
RAW = st.lists(st.binary(max_size=8) | st.sampled_from([b"\0" * 4, b"\1" * 8, b"\2" * 16]), max_size=3)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    sent = ModelInferRequest(model_name=draw(st.sampled_from(["m", "n"])), id=draw(st.sampled_from(["", "", "1"])))
    for name, datatype, shape in draw(INPUTS):
        sent.inputs.add(name=name, datatype=datatype, shape=shape)
    sent.raw_input_contents.extend(draw(RAW))
    if draw(st.booleans()):
        sent.outputs.add(name="y")
    if draw(st.integers(0, 4)) == 0:
        sent.parameters["sequence_start"].bool_param = True
    body = bytearray(sent.SerializeToString(deterministic=True))
    if body and draw(st.integers(0, 3)) == 0:
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body) + draw(st.sampled_from([b"", b"", b"", b"\x0a\x01n", b"\x3a\x00", b"\x3a\x7f"]))


@given(st.lists(messages(), min_size=1, max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_a_stream_of_messages_means_the_same_with_and_without_memory(sent: list[bytes], data: st.DataObject) -> None:
    known = MessageLayoutCache()
    for _ in range(12):
        body = bytearray(data.draw(st.sampled_from(sent)))
        for place in places(known, bytes(body)):  # other values, as a client would send
            size = prod(place.shape) * place.dtype.itemsize
            body[place.begin : place.begin + size] = data.draw(st.binary(min_size=size, max_size=size))
        assert outcome(known, bytes(body)) == outcome(None, bytes(body))
