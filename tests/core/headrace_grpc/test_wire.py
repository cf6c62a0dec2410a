"""Hand-made wire bytes against protobuf's own."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as triton

from headrace_grpc import wire
from headrace_grpc.grpc_service_pb2 import ModelInferRequest

raws = st.lists(st.binary(max_size=300), max_size=4)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    message = triton.ModelInferRequest(
        model_name=draw(st.text(max_size=5)), id=draw(st.text(max_size=5)), raw_input_contents=draw(raws)
    )
    for name in draw(st.lists(st.text(max_size=5), max_size=3)):
        tensor = message.inputs.add(name=name, datatype="INT64", shape=draw(st.lists(st.integers(-1, 2**40))))
        tensor.contents.int64_contents.extend(draw(st.lists(st.integers(-5, 5))))
    parameters = draw(st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False)))
    for key, value in parameters.items():
        message.parameters[key].double_param = value
    body: bytes = message.SerializeToString()
    return body


def test_split_finds_what_protobuf_finds() -> None:
    @given(st.lists(requests(), min_size=1, max_size=3))
    def check(bodies: list[bytes]) -> None:
        body = b"".join(bodies)  # concatenation merges messages, so raw contents stand between other fields
        expected = ModelInferRequest.FromString(body)
        raw_request = wire.split(body)
        assert raw_request is not None
        assert [bytes(view) for view in raw_request.raw] == list(expected.raw_input_contents)
        del expected.raw_input_contents[:]
        assert raw_request.message == expected

    check()


@given(st.binary(max_size=60) | st.builds(lambda body, cut: body[:cut], requests(), st.integers(0, 200)))
def test_split_refuses_what_protobuf_refuses(body: bytes) -> None:
    try:
        expected = list(ModelInferRequest.FromString(body).raw_input_contents)
    except DecodeError:
        with pytest.raises(DecodeError):
            wire.split(body) or ModelInferRequest.FromString(body)
    else:
        raw_request = wire.split(body)
        assert raw_request is None or [bytes(view) for view in raw_request.raw] == expected


def test_large_contents_are_views_of_the_body() -> None:
    content = np.arange(wire.SPLIT_BYTES, dtype=np.uint8).tobytes()
    body = triton.ModelInferRequest(model_name="m", raw_input_contents=[content]).SerializeToString()
    (view,) = wire.unpack(body).raw
    assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(body, np.uint8))
    assert bytes(view) == content


def test_a_message_of_very_many_fields_is_left_to_protobuf() -> None:
    body = triton.ModelInferRequest(raw_input_contents=[b"x"] * (wire.SPLIT_FIELDS + 1)).SerializeToString()
    assert wire.split(body) is None
    assert wire.split(body[: 3 * wire.SPLIT_FIELDS]) is not None
    assert list(wire.unpack(body * 4).raw) == [b"x"] * (4 * wire.SPLIT_FIELDS + 4)


def test_small_contents_are_the_same() -> None:
    body = triton.ModelInferRequest(model_name="m", raw_input_contents=[b"ab", b""]).SerializeToString()
    assert list(wire.unpack(body).raw) == [b"ab", b""]
