"""Messages that are read without protobuf have the same meaning as with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.messages.request import InferRequest
from headrace.messages.tensor import BytesTensor
from headrace_grpc import decode as plain
from headrace_grpc import usual_messages as usual
from headrace_grpc import wire
from headrace_grpc.grpc_service_pb2 import ModelInferRequest
from headrace_grpc.usual_messages import UsualMessage

FIELDS = ("model_name", "model_version", "id", "priority", "timeout_us")
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


def ignore(answer: Any, final: bool) -> None:
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


def outcome(body: bytes | memoryview, *, alone: bool = False) -> tuple[Any, ...]:
    """Return the request in ``body``, or the error; read by protobuf only if ``alone``."""
    try:
        decoded = plain.decode(wire.unpack(body)) if alone else usual.decode(usual.unpack(body))
    except (HeadraceError, DecodeError) as error:
        return type(error), str(error)
    return (*said(decoded.request), dict(decoded.classes), decoded.empty_final)


def is_usual(body: bytes | memoryview) -> bool:
    try:
        return isinstance(usual.unpack(body), UsualMessage)
    except DecodeError:
        return False


def with_output(body: bytes, **parameters: Any) -> bytes:
    sent = ModelInferRequest.FromString(body)
    output = sent.outputs.add(name="y")
    for name, value in parameters.items():
        setattr(output.parameters[name], "int64_param" if isinstance(value, int) else "string_param", value)
    return sent.SerializeToString(deterministic=True)


def twice(body: bytes) -> bytes:
    """With a second input of the same name."""
    sent = ModelInferRequest.FromString(body)
    sent.inputs.add().CopyFrom(sent.inputs[0])
    sent.raw_input_contents.append(sent.raw_input_contents[0])
    return sent.SerializeToString()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(message(), id="plain"),
        pytest.param(message(id="7-ü"), id="an id"),
        pytest.param(message(sequence_id=3, sequence_start=True), id="a sequence"),
        pytest.param(message(sequence_id="three", sequence_end=True), id="a sequence with a name"),
        pytest.param(message(priority=2, timeout=30, color="red"), id="parameters"),
        pytest.param(message(datatype="BYTES"), id="strings, whatever they are"),
        pytest.param(message() + b"\x0a\x01n", id="a second name behind the tensors"),
        pytest.param(message(triton_enable_empty_final_response=True), id="what a stream asks for"),
        pytest.param(with_output(message()), id="an output"),
        pytest.param(with_output(message(), classification=3), id="classes of an output"),
        pytest.param(memoryview(message(1, (1, 40_000))), id="a large one in a view"),
    ],
)
def test_usual_messages_are_read_without_protobuf(body: bytes) -> None:
    assert is_usual(body)
    assert outcome(body) == outcome(body, alone=True)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(message(shape=(0,)), id="no elements"),
        pytest.param(message(datatype="FP128"), id="a type that is none"),
        pytest.param(message(datatype="FP64"), id="fewer bytes than the shape says"),
        pytest.param(message()[:-1], id="truncated"),
        pytest.param(message() + b"\x3a\x02ab", id="more contents than inputs"),
        pytest.param(message() + b"\x40\x01", id="a field that there is not"),
        pytest.param(message() + b"\x0a\x01\xff", id="a name that is no text"),
        pytest.param(message() + b"\x2a\x02\x0a\x07", id="an input that is none"),
        pytest.param(message(sequence_start=3), id="a parameter of a wrong type"),
        pytest.param(message(triton_mine=True), id="a reserved parameter"),
        pytest.param(message(note="n" * 1100), id="a long parameter"),
        pytest.param(with_output(message(), classification=0), id="no classes of an output"),
        pytest.param(with_output(message(), shared_memory_region="r"), id="an output in shared memory"),
        pytest.param(twice(message()), id="an input twice"),
        pytest.param(message(shape=(1,) * 20 + (4,)), id="many dimensions"),
        pytest.param(message() + b"\x1a\x00" * 64, id="many fields"),
    ],
)
def test_unusual_messages_are_left_to_protobuf(body: bytes) -> None:
    assert not is_usual(body)
    assert outcome(body) == outcome(body, alone=True)


def test_large_tensors_are_views_of_what_was_received() -> None:
    body = message(2, (1, 40_000))
    tensor = usual.decode(usual.unpack(memoryview(body))).request.inputs["x"]
    assert isinstance(tensor, np.ndarray)
    assert np.shares_memory(tensor, np.frombuffer(body, np.uint8)), "the tensor was copied"


def test_no_more_fields_are_walked_over_than_a_request_has_however_small_they_are() -> None:
    """The bytes of tensors, too: a message of 60 MiB has room for thirty million empty ones."""
    empty = bytes((usual._RAW, 0))
    steps = _Steps(empty * 1_000_000)
    assert usual._read(steps) is None
    assert steps.read < 10 * usual._MOST_FIELDS


class _Steps(bytes):
    """Counts the bytes that are read."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        self.read += 1
        return super().__getitem__(at)


def test_each_request_has_parameters_of_its_own() -> None:
    body = message(color="red")
    for _ in range(2):
        request = usual.decode(usual.unpack(body)).request
        assert request.parameters == {"color": "red"}
        request.parameters["color"] = "blue"  # type: ignore[index]  # as a careless model would


@pytest.mark.parametrize("own", [{}, {"color": "red"}])
def test_forwarded_metadata_is_added_to_its_request_only(own: dict[str, Any]) -> None:
    body = message(**own)
    assert usual.decode(usual.unpack(body), {"user": "a"}).request.parameters == {**own, "user": "a"}
    assert usual.decode(usual.unpack(body)).request.parameters == own


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
        sent.outputs.add(name="y").parameters["classification"].int64_param = draw(st.integers(-1, 2))
    if draw(st.integers(0, 3)) == 0:
        sent.parameters["sequence_start"].bool_param = True
    if draw(st.integers(0, 3)) == 0:
        sent.parameters[draw(st.sampled_from(["sequence_id", "priority", "mine"]))].int64_param = draw(
            st.integers(-1, 9)
        )
    body = bytearray(sent.SerializeToString(deterministic=True))
    if body and draw(st.integers(0, 3)) == 0:
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body) + draw(st.sampled_from([b"", b"", b"", b"\x0a\x01n", b"\x3a\x00", b"\x3a\x7f"]))


@given(messages())
@settings(max_examples=1000, deadline=None)
def test_any_message_means_the_same_with_and_without_protobuf(body: bytes) -> None:
    assert outcome(body) == outcome(body, alone=True)


def two_inputs(**fields: Any) -> bytes:
    sent = ModelInferRequest.FromString(message(id="0123", **fields))
    sent.model_version = "2"
    sent.inputs.add(name="z", datatype="INT32", shape=[3])
    sent.raw_input_contents.append(np.arange(3, dtype=np.int32).tobytes())
    return sent.SerializeToString()


#: The fields that perf_analyzer and Triton's C++ client send in every request.
CLIENTS: dict[str, Any] = {"triton_enable_empty_final_response": True}


@pytest.mark.parametrize("parameters", [{}, CLIENTS, {"priority": 2, "color": "red"}])
def test_a_message_that_differs_in_any_byte_from_one_before_means_what_it_says(parameters: dict[str, Any]) -> None:
    """The byte is one of an id, of a tensor, of a parameter, or of what the two have in common."""
    body = two_inputs(**parameters)
    for at in range(len(body)):
        for byte in (body[at] ^ 1, body[at] ^ 0x80, 0x0A, 0x3A):
            usual.unpack(body)
            usual.unpack(body)  # so that it is known
            assert usual._read_alike(body) is not None
            other = body[:at] + bytes([byte]) + body[at + 1 :]
            assert outcome(other) == outcome(other, alone=True), (at, byte)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The messages that were walked over, none of which was like one before the test."""
    read, seen = usual._read, list[bytes]()

    def walk(body: bytes) -> Any:
        seen.append(body)
        return read(body)

    monkeypatch.setattr(usual, "_read", walk)
    usual._layouts.clear()
    usual._parameters.cache_clear()
    return seen


@pytest.mark.parametrize(("parameters", "most"), [({}, 1), (CLIENTS, 2), ({"priority": 2, "color": "red"}, 2)])
def test_messages_alike_are_not_walked_over(walked: list[bytes], parameters: dict[str, Any], most: int) -> None:
    for number in range(5):
        body = two_inputs(value=float(number), **parameters).replace(b"0123", b"%04d" % number)
        assert outcome(body) == outcome(body, alone=True)
    assert len(walked) == most


@pytest.mark.parametrize("name", ["sequence_id", "mine"])
def test_parameters_that_change_from_request_to_request_are_not_remembered(walked: list[bytes], name: str) -> None:
    for number in range(20):
        body = two_inputs(**{name: f"{number:04}"})
        for _ in range(1 if name == "mine" else 3):
            assert outcome(body) == outcome(body, alone=True)
            walked.append(b"")
    assert len(walked) == 2 * walked.count(b"")
    assert len(usual._layouts) == 0


def test_each_of_two_messages_alike_has_parameters_of_its_own() -> None:
    for _ in range(4):
        request = usual.decode(usual.unpack(two_inputs(color="red"))).request
        assert request.parameters == {"color": "red"}
        request.parameters["color"] = "blue"  # type: ignore[index]  # as a careless model would


def test_messages_alike_are_said_to_be_and_others_are_not() -> None:
    usual._layouts.clear()
    made = [two_inputs(value=value) for value in (1.0, 2.0, 3.0)]
    first, *alike = [usual.decode(usual.unpack(body)).request.alike for body in made]
    assert first is None
    assert alike[0] is alike[1] is not None
    other = made[0].replace(b"INT32", b"INT64", 1)  # another message of the same size
    usual.unpack(other)
    assert usual.decode(usual.unpack(other)).request.alike not in alike


def test_message_cache_is_bounded() -> None:
    for number in range(1000):
        usual.unpack(message(model=f"model-{number}"))
    assert len(usual._layouts) <= 256


def test_of_a_text_said_twice_both_must_be_text() -> None:
    body = b"\x0a\x01\x80" + message()
    assert outcome(body) == outcome(body, alone=True)
    assert outcome(body)[0] is DecodeError
