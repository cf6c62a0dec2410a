"""Requests as the stock client writes them, to tensors; and the texts of docs/spec/behaviours.md section 2.3."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as client
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.grpc._utils import _get_inference_request

from headrace.errors import Code, HeadraceError
from headrace.messages import dtypes
from headrace.messages.request import MAX_INPUTS, InferRequest, Undecoded
from headrace.messages.tensor import BytesTensor
from headrace.off_loop import UNBOUNDED
from headrace_grpc import wire
from headrace_grpc.decode import Decoded, decode
from headrace_grpc.grpc_service_pb2 import InferParameter, ModelInferRequest

NUMERIC = [dtype for dtype in dtypes.ALL if dtype.name not in ("BYTES", "BF16")]
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def read(message: ModelInferRequest) -> Decoded:
    return decode(wire.unpack(message.SerializeToString(), UNBOUNDED))


def read_client(inputs: list[Any], **settings: Any) -> InferRequest:
    """Return our reading of a message that tritonclient wrote."""
    defaults = {
        "model_version": "", "request_id": "", "outputs": None, "sequence_id": 0, "sequence_start": False,
        "sequence_end": False, "priority": 0, "timeout": None, "parameters": None,
    }  # fmt: skip
    body = _get_inference_request("m", inputs, **{**defaults, **settings}).SerializeToString()
    return decode(wire.unpack(body, UNBOUNDED)).request


def raw(datatype: str, shape: list[int], content: bytes) -> Any:
    message = ModelInferRequest(model_name="m", raw_input_contents=[content])
    message.inputs.add(name="x", datatype=datatype, shape=shape)
    return read(message).request.inputs["x"]


def typed(datatype: str, shape: list[int], **fields: list[Any]) -> Any:
    message = ModelInferRequest(model_name="m")
    contents = message.inputs.add(name="x", datatype=datatype, shape=shape).contents
    contents.SetInParent()
    for name, values in fields.items():
        getattr(contents, name).extend(values)
    return read(message).request.inputs["x"]


@pytest.mark.parametrize("datatype", NUMERIC, ids=str)
@given(data=st.data())
def test_decoded_request_equals_the_clients(datatype: dtypes.DataType, data: st.DataObject) -> None:
    array = data.draw(hnp.arrays(datatype.numpy, shapes))
    tensor = client.InferInput("x", list(array.shape), datatype.name)
    tensor.set_data_from_numpy(array)
    received = read_client([tensor]).inputs["x"]
    assert isinstance(received, np.ndarray)
    assert received.dtype == array.dtype
    np.testing.assert_array_equal(received, array)


@given(st.lists(st.binary(max_size=6).filter(lambda item: not item.endswith(b"\0")), max_size=6))
def test_strings_the_client_sends_arrive(items: list[bytes]) -> None:
    tensor = client.InferInput("x", [len(items)], "BYTES")
    tensor.set_data_from_numpy(np.array(items, dtype=np.object_))
    received = read_client([tensor]).inputs["x"]
    assert isinstance(received, BytesTensor)
    assert received.items() == items


def test_bf16_arrives() -> None:
    values = np.array([1.5, -2.0, 3e38], ml_dtypes.bfloat16)
    tensor = client.InferInput("x", [3], "BF16")
    tensor.set_data_from_numpy(values)
    received = read_client([tensor]).inputs["x"]
    assert isinstance(received, np.ndarray)
    assert received.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(received, values)


def test_settings_of_the_client_arrive() -> None:
    tensor = client.InferInput("x", [1], "UINT8")
    tensor.set_data_from_numpy(np.zeros(1, np.uint8))
    request = read_client(
        [tensor], model_version="3", request_id="r", sequence_id="s", sequence_start=True, sequence_end=True,
        priority=2**63, timeout=9, parameters={"a": 1, "b": "t", "c": True, "d": 0.5},
        outputs=[client.InferRequestedOutput("y"), client.InferRequestedOutput("z", class_count=2)],
    )  # fmt: skip
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "r")
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == ("s", True, True)
    assert (request.priority, request.timeout_us) == (2**63, 9)
    assert request.parameters == {"a": 1, "b": "t", "c": True, "d": 0.5}
    assert request.outputs == ["y", "z"]


@pytest.mark.parametrize(
    ("datatype", "field", "values", "expected"),
    [
        ("BOOL", "bool_contents", [True, False], np.array([True, False])),
        ("INT8", "int_contents", [-1, 257], np.array([-1, 1], np.int8)),
        ("INT16", "int_contents", [-1, 65537], np.array([-1, 1], np.int16)),
        ("INT32", "int_contents", [-1, 2**31 - 1], np.array([-1, 2**31 - 1], np.int32)),
        ("INT64", "int64_contents", [-(2**63), 5], np.array([-(2**63), 5], np.int64)),
        ("UINT8", "uint_contents", [255, 258], np.array([255, 2], np.uint8)),
        ("UINT16", "uint_contents", [65535, 65538], np.array([65535, 2], np.uint16)),
        ("UINT32", "uint_contents", [0, 2**32 - 1], np.array([0, 2**32 - 1], np.uint32)),
        ("UINT64", "uint64_contents", [0, 2**64 - 1], np.array([0, 2**64 - 1], np.uint64)),
        ("FP32", "fp32_contents", [0.5, float("inf")], np.array([0.5, np.inf], np.float32)),
        ("FP64", "fp64_contents", [0.1, -0.0], np.array([0.1, -0.0])),
    ],
)
def test_typed_contents_become_tensors(datatype: str, field: str, values: list[Any], expected: Any) -> None:
    received = typed(datatype, [2, 1], **{field: values})
    assert received.dtype == expected.dtype
    np.testing.assert_array_equal(received, expected.reshape(2, 1))


def test_typed_strings_become_wire_form() -> None:
    received = typed("BYTES", [2], bytes_contents=[b"ab", b""])
    assert bytes(received.buffer) == b"\x02\0\0\0ab\0\0\0\0"


def test_empty_contents_suit_a_tensor_without_elements() -> None:
    assert typed("FP32", [0, 3]).shape == (0, 3)


@pytest.mark.parametrize(
    ("datatype", "shape", "content"),
    [
        ("FP32", [2], b"\0" * 7),
        ("FP32", [2], b"\0" * 12),
        ("FP32", [-1], b"\0" * 4),
        ("BYTES", [-1], b""),
        ("FLOAT", [1], b"\0" * 4),
        ("fp32", [1], b"\0" * 4),
        ("UINT8", [2**62, 2**62], b"\0"),
        ("UINT8", [2**62, 2**62, 0], b""),
        ("UINT8", [1] * 65, b"\0"),
    ],
)
def test_contradictions_are_left_to_the_signature(datatype: str, shape: list[int], content: bytes) -> None:
    received = raw(datatype, shape, content)
    assert isinstance(received, Undecoded)
    assert (received.datatype, list(received.shape), bytes(received.buffer)) == (datatype, shape, content)


def refusal(message: ModelInferRequest) -> tuple[Code, str]:
    with pytest.raises(HeadraceError) as caught:
        read(message)
    return caught.value.code, caught.value.message


NO_BOOL = InferParameter(int64_param=1)
KEYS = "Only the following keys starting with 'triton_' are allowed: triton_enable_empty_final_response"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "sequence_id", InferParameter(uint64_param=1),
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        ("sequence_start", NO_BOOL, "invalid value type for 'sequence_start' parameter, expected bool_param."),
        ("sequence_end", NO_BOOL, "invalid value type for 'sequence_end' parameter, expected bool_param."),
        ("priority", InferParameter(int64_param=-1), "invalid value for 'priority', expected value >= 0."),
        (
            "priority", InferParameter(string_param="1"),
            "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
        ),
        (
            "timeout", InferParameter(uint64_param=1),
            "invalid value type for 'timeout' parameter, expected int64_param.",
        ),
        ("timeout", InferParameter(int64_param=-1), "invalid value for 'timeout', expected value >= 0."),
        ("triton_x", NO_BOOL, f"parameter keys starting with 'triton_' are reserved for Triton usage. {KEYS}"),
        (
            "p", InferParameter(uint64_param=1),
            "invalid value type for 'p' parameter, expected int64_param, bool_param, or string_param.",
        ),
        (
            "p", InferParameter(),
            "invalid value type for 'p' parameter, expected int64_param, bool_param, or string_param.",
        ),
    ],
)  # fmt: skip
def test_a_parameter_of_the_wrong_type_is_refused(key: str, value: InferParameter, text: str) -> None:
    message = ModelInferRequest(model_name="m")
    message.parameters[key].CopyFrom(value)
    assert refusal(message) == (Code.INVALID_ARGUMENT, text)


def test_a_negative_sequence_id_is_tritons_unsigned_one() -> None:
    message = ModelInferRequest()
    message.parameters["sequence_id"].int64_param = -1
    assert read(message).request.sequence_id == 2**64 - 1


def one_input(**parameters: InferParameter) -> ModelInferRequest:
    message = ModelInferRequest(model_name="m", id="7")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1])
    for key, value in parameters.items():
        tensor.parameters[key].CopyFrom(value)
    return message


def test_an_input_without_data_is_refused() -> None:
    text = "unable to find data for input tensor 'x' for model 'm' in request."
    assert refusal(one_input()) == (Code.INVALID_ARGUMENT, text)


def test_a_flood_of_inputs_is_refused_by_number() -> None:
    message = ModelInferRequest(model_name="m", id="7")
    for number in range(MAX_INPUTS + 1):
        message.inputs.add(name=f"i{number}", datatype="FP32", shape=[1])
    assert refusal(message) == (Code.INVALID_ARGUMENT, "request has 4097 inputs, the limit is 4096")


def test_an_input_given_twice_is_refused() -> None:
    message = one_input()
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    message.raw_input_contents.extend([b"\0" * 4] * 2)
    assert refusal(message) == (Code.INVALID_ARGUMENT, "[request id: 7] input 'x' already exists in request")


def test_typed_contents_beside_raw_ones_are_refused() -> None:
    message = one_input()
    message.inputs[0].contents.fp32_contents.append(1)
    message.raw_input_contents.append(b"")
    text = "contents field must not be specified when using raw_input_contents for 'x' for model 'm'"
    assert refusal(message) == (Code.INVALID_ARGUMENT, text)


def test_the_wrong_field_for_the_datatype_is_refused() -> None:
    message = one_input()
    message.inputs[0].contents.int_contents.append(1)
    text = (
        "unexpected explicit tensor data for input tensor 'x' for model 'm' of type 'INT32', expected datatype 'FP32'"
    )
    assert refusal(message) == (Code.INVALID_ARGUMENT, text)


def test_two_fields_are_refused() -> None:
    message = one_input()
    message.inputs[0].contents.fp32_contents.append(1)
    message.inputs[0].contents.fp64_contents.append(1)
    text = "unexpected explicit tensor data for input tensor 'x' for model 'm', binary data was already supplied."
    assert refusal(message) == (Code.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"shared_memory_region": InferParameter(int64_param=1)},
            "invalid value type for 'shared_memory_region' parameter for tensor 'x', expected string_param.",
        ),
        (
            {"shared_memory_offset": InferParameter(int64_param=1)},
            "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor 'x'",
        ),
        (
            {"shared_memory_region": InferParameter(string_param="r")},
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'x'",
        ),
    ],
)
def test_incomplete_shared_memory_is_refused(parameters: dict[str, InferParameter], text: str) -> None:
    assert refusal(one_input(**parameters)) == (Code.INVALID_ARGUMENT, text)


REGION = {"shared_memory_region": InferParameter(string_param="r"), "shared_memory_byte_size": NO_BOOL}


def test_a_region_is_never_found() -> None:
    assert refusal(one_input(**REGION)) == (Code.NOT_FOUND, "Unable to find shared memory region: 'r'")


def test_a_region_beside_contents_is_refused() -> None:
    message = one_input(**REGION)
    message.inputs[0].contents.fp32_contents.append(1)
    text = "unexpected 'content' provided when using shared memory for input tensor 'x' for model 'm'"
    assert refusal(message) == (Code.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"classification": InferParameter(int64_param=0)},
            "invalid value for 'classification' parameter, expected >= 0",
        ),
        (
            {"classification": InferParameter(bool_param=True)},
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
        (
            {"classification": NO_BOOL, **REGION},
            "output can't set both 'shared_memory_region' and 'classification'",
        ),
    ],
)  # fmt: skip
def test_a_wrong_classification_is_refused(parameters: dict[str, InferParameter], text: str) -> None:
    message = ModelInferRequest(model_name="m")
    output = message.outputs.add(name="y")
    for key, value in parameters.items():
        output.parameters[key].CopyFrom(value)
    assert refusal(message) == (Code.INVALID_ARGUMENT, text)


def test_classes_are_read_per_output() -> None:
    message = ModelInferRequest()
    message.outputs.add(name="y").parameters["classification"].int64_param = 3
    message.outputs.add(name="z")
    assert read(message).classes == {"y": 3}


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid request with a few bytes changed."""
    message = one_input()
    message.raw_input_contents.append(b"\0\0\0\0")
    message.parameters["p"].double_param = 1
    message.outputs.add(name="y").parameters["classification"].int64_param = 3
    body = bytearray(message.SerializeToString())
    for position, value in draw(
        st.dictionaries(st.integers(0, len(body) - 1), st.integers(0, 255), max_size=4)
    ).items():
        body[position] = value
    return bytes(body)


@given(st.binary(max_size=100) | mutated())
def test_bad_bytes_are_refused_and_nothing_worse(body: bytes) -> None:
    with contextlib.suppress(DecodeError, HeadraceError):
        decode(wire.unpack(body))
    with contextlib.suppress(DecodeError, HeadraceError):
        raw_request = wire.split(body)
        assert raw_request is None or decode(raw_request)
