"""Bodies in and out. The oracles are the stock client and the texts of docs/spec/behaviours.md section 1.3."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient import http as triton
from tritonclient.utils import np_to_triton_dtype

from headrace.messages.request import InferRequest

RID = "[request id: <id_unknown>] "
MakeCaller = Callable[..., Any]
FIXED = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")
NUMPY = {name: np.dtype(name.lower().replace("fp", "float")) for name in FIXED}


def tensor(name: str, datatype: str, shape: list[Any], **rest: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **rest}


def binary(name: str, datatype: str, shape: list[int], size: int) -> dict[str, Any]:
    return tensor(name, datatype, shape, parameters={"binary_data_size": size})


def error_of(body: bytes) -> str:
    document = json.loads(body)
    assert list(document) == ["error"]
    return str(document["error"])


def result_of(reply: Any, body: bytes) -> triton.InferResult:
    headers = dict(reply.headers)
    length = headers.get(b"Inference-Header-Content-Length")
    return triton.InferResult.from_response_body(
        body,
        header_length=int(length) if length else None,
        content_encoding=headers.get(b"Content-Encoding", b"").decode(),
    )


@st.composite
def arrays(draw: st.DrawFn, names: tuple[str, ...] = FIXED) -> npt.NDArray[Any]:
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))
    array: npt.NDArray[Any] = draw(hnp.arrays(NUMPY[draw(st.sampled_from(names))], shape))
    return array


def round_trip(make_caller: MakeCaller, array: npt.NDArray[Any], *, is_binary: bool) -> npt.NDArray[Any]:
    """Through the client's encoder, our decoder, our encoder and the client's decoder."""
    datatype = np_to_triton_dtype(array.dtype)
    caller = make_caller({"X": (datatype, (-1,) * array.ndim)})
    item = triton.InferInput("X", list(array.shape), datatype)
    item.set_data_from_numpy(array, binary_data=is_binary)
    wanted = [triton.InferRequestedOutput("X", binary_data=is_binary)]
    body, length = triton.InferenceServerClient.generate_request_body([item], outputs=wanted)
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
    reply, answer = caller.send("POST", "/v2/models/echo/infer", body, headers)
    assert reply.status == 200, answer
    got: npt.NDArray[Any] = result_of(reply, answer).as_numpy("X")
    return got


@given(array=arrays())
@settings(max_examples=150, deadline=None)
def test_binary_tensor_comes_back_bit_for_bit(make_caller: MakeCaller, array: npt.NDArray[Any]) -> None:
    got = round_trip(make_caller, array, is_binary=True)
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert got.tobytes() == array.tobytes()


@given(array=arrays(tuple(name for name in FIXED if name != "FP16")))
@settings(max_examples=150, deadline=None)
def test_json_tensor_comes_back_with_the_same_values(make_caller: MakeCaller, array: npt.NDArray[Any]) -> None:
    got = round_trip(make_caller, array, is_binary=False)
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    np.testing.assert_array_equal(got, array)


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6), is_binary=st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_strings_come_back(make_caller: MakeCaller, texts: list[str], is_binary: bool) -> None:
    array = np.array([text.encode() for text in texts], dtype=np.object_)
    got = round_trip(make_caller, array, is_binary=is_binary)
    assert [item if isinstance(item, bytes) else item.encode() for item in got.tolist()] == array.tolist()


@given(junk=st.binary(max_size=200), length=st.one_of(st.none(), st.integers(-5, 300)))
@settings(max_examples=300, deadline=None)
def test_junk_never_gets_past_an_error_reply(make_caller: MakeCaller, junk: bytes, length: int | None) -> None:
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
    reply, body = make_caller({"X": ("FP32", (4,))}).send("POST", "/v2/models/echo/infer", junk, headers)
    assert reply.status in (400, 500) or (length == 0 and len(junk) == 16)
    assert reply.status == 200 or error_of(body)


_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=3)
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@given(
    field=st.sampled_from(
        ("name", "datatype", "shape", "data", "parameters", "binary_data_size", "id", "outputs", "priority")
    ),
    value=_values,
)
@settings(max_examples=300, deadline=None)
def test_any_field_may_hold_any_json_value(make_caller: MakeCaller, field: str, value: Any) -> None:
    document: dict[str, Any] = {"inputs": [tensor("X", "FP32", [4], data=[1, 2, 3, 4])]}
    if field in ("id", "outputs"):
        document[field] = value
    elif field == "priority":
        document["parameters"] = {field: value}
    elif field == "binary_data_size":
        document["inputs"] = [tensor("X", "FP32", [4], parameters={field: value})]
    else:
        document["inputs"][0][field] = value
    reply, body = make_caller({"X": ("FP32", (4,))}).infer(json.dumps(document).encode())
    assert reply.status in (200, 400, 404, 500)
    assert json.loads(body)


# ---------------------------------------------------------------------------------------- golden bytes


def test_binary_reply_is_json_and_then_the_tensors(make_caller: MakeCaller) -> None:
    data = np.array([1, 2], np.float32).tobytes()
    caller = make_caller({"X": ("FP32", (2,)), "Y": ("INT8", (1,))})
    request = {
        "id": "7",
        "parameters": {"binary_data_output": True},
        "inputs": [binary("X", "FP32", [2], 8), binary("Y", "INT8", [1], 1)],
    }
    reply, body = caller.infer(request, data + b"\x05")
    expected = (
        b'{"id":"7","model_name":"echo","model_version":"1","outputs":['
        b'{"name":"X","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}},'
        b'{"name":"Y","datatype":"INT8","shape":[1],"parameters":{"binary_data_size":1}}]}'
    )
    assert body == expected + data + b"\x05"
    assert list(reply.headers) == [
        (b"Content-Type", b"application/octet-stream"),
        (b"Inference-Header-Content-Length", str(len(expected)).encode()),
    ]


def test_json_reply_widens_floats_and_spells_out_what_is_not_finite(make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("FP32", (4,))})
    request = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[4],"data":[0.1,NaN,Inf,-Infinity]}]}'
    reply, body = caller.infer(request)
    assert body == (
        b'{"model_name":"echo","model_version":"1","outputs":[{"name":"X","datatype":"FP32","shape":[4],'
        b'"data":[0.10000000149011612,NaN,Infinity,-Infinity]}]}'
    )
    assert list(reply.headers) == [(b"Content-Type", b"application/json")]


@pytest.mark.parametrize("size", [3, 500])
def test_small_and_large_arrays_print_alike(make_caller: MakeCaller, size: int) -> None:
    values = np.linspace(0, 1, size, dtype=np.float32)
    caller = make_caller({"X": ("FP32", (size,))})
    body = caller.infer({"inputs": [tensor("X", "FP32", [size], data=values.tolist())]})[1]
    assert json.loads(body)["outputs"][0]["data"] == values.astype(np.float64).tolist()


def test_listed_output_is_json_even_if_binary_is_the_default(make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("INT32", (1,))})
    request = {
        "parameters": {"binary_data_output": True},
        "inputs": [tensor("X", "INT32", [1], data=[5])],
        "outputs": [{"name": "X"}],
    }
    assert b'"data":[5]' in caller.infer(request)[1]


def test_empty_binary_outputs_make_a_json_reply(make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("FP32", (-1,))})
    request = {"inputs": [tensor("X", "FP32", [0], data=[])], "parameters": {"binary_data_output": True}}
    reply, body = caller.infer(request)
    assert list(reply.headers) == [(b"Content-Type", b"application/json")]
    assert json.loads(body)["outputs"][0]["parameters"] == {"binary_data_size": 0}


def test_strings_that_are_not_utf8_go_out_raw(make_caller: MakeCaller) -> None:
    caller = make_caller({"S": ("BYTES", (1,))})
    request = {"inputs": [binary("S", "BYTES", [1], 7)], "outputs": [{"name": "S"}]}
    assert b'"data":["\xff\\"a"]' in caller.infer(request, b'\x03\0\0\0\xff"a')[1]


def test_classification_names_the_top_classes(make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("FP32", (3,))}, 8)
    caller.model.labels["X"] = ["cat", "dog"]
    wanted = [{"name": "X", "parameters": {"classification": 2, "binary_data": True}}]
    request = {"inputs": [tensor("X", "FP32", [1, 3], data=[0.25, 0.5, 0.75])], "outputs": wanted}
    got = result_of(*caller.infer(request)).as_numpy("X")
    assert got.tolist() == [[b"0.750000:2", b"0.500000:1:dog"]]


def test_bfloat16_travels_in_binary_only(make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("BF16", (2,))})
    data = np.array([1.5, -2], ml_dtypes.bfloat16).tobytes()
    inputs = [binary("X", "BF16", [2], 4)]
    assert caller.infer({"inputs": inputs, "parameters": {"binary_data_output": True}}, data)[1].endswith(data)
    reply, body = caller.infer({"inputs": inputs}, data)
    text = "sending BF16 data via JSON is not supported. Please use the binary data format for output"
    assert (reply.status, error_of(body)) == (400, text)


def test_binary_input_is_a_view_on_the_body(make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("UINT8", (4,))})
    caller.infer({"inputs": [binary("X", "UINT8", [4], 4)]}, b"abcd")
    request: InferRequest = caller.model.requests[0]
    array = request.inputs["X"]
    assert isinstance(array, np.ndarray)
    assert not array.flags.owndata
    owner: object = array.base
    assert isinstance(owner, bytes)
    assert owner.endswith(b"}]}abcd")


def test_parameters_reach_the_request(make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("INT8", (1,))})
    parameters = {
        "sequence_id": 2**64 - 1,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 3,
        "timeout": 9,
        "a": "b",
        "i": 1,
        "d": 1.0,
        "huge": 2**63,
    }
    caller.infer({"id": "r", "parameters": parameters, "inputs": [tensor("X", "INT8", [1], data=[1])]})
    request = caller.model.requests[0]
    assert (request.id, request.sequence_id, request.sequence_start, request.sequence_end) == (
        "r",
        2**64 - 1,
        True,
        True,
    )
    assert (request.priority, request.timeout_us) == (3, 9)
    assert request.parameters == {"a": "b", "i": 1, "d": 1.0, "huge": 2.0**63}
    assert [type(value) for value in request.parameters.values()] == [str, int, float, float]


def test_integers_are_truncated_to_their_width(make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("INT8", (3,)), "Y": ("UINT16", (1,))})
    inputs = [tensor("X", "INT8", [3], data=[300, -129, 2**40 + 1]), tensor("Y", "UINT16", [1], data=[2**16 + 2])]
    outputs = json.loads(caller.infer({"inputs": inputs})[1])["outputs"]
    assert [output["data"] for output in outputs] == [[44, 127, 1], [2]]


@pytest.mark.parametrize("data", [[[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]], [1, [2, [3]], 4], [[[1, 2, 3, 4]]]])
def test_nesting_need_not_match_the_shape(make_caller: MakeCaller, data: list[Any]) -> None:
    caller = make_caller({"X": ("INT64", (4,))})
    assert b'"data":[1,2,3,4]' in caller.infer({"inputs": [tensor("X", "INT64", [4], data=data)]})[1]


# ---------------------------------------------------------------------------------------- raw requests


def test_raw_request_is_the_one_input(make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("FP32", (-1, 2))}, 8)
    data = np.arange(6, dtype=np.float32)
    reply, body = caller.send("POST", "/v2/models/echo/infer", data.tobytes(), {"Inference-Header-Content-Length": "0"})
    got = result_of(reply, body).as_numpy("X")
    np.testing.assert_array_equal(got, data.reshape(1, 3, 2))


def test_raw_string_gets_its_length_from_the_server(make_caller: MakeCaller) -> None:
    caller = make_caller({"S": ("BYTES", (1,))})
    reply, body = caller.send("POST", "/v2/models/echo/infer", b"hello", {"Inference-Header-Content-Length": "0"})
    assert result_of(reply, body).as_numpy("S").tolist() == [b"hello"]


@pytest.mark.parametrize(
    ("inputs", "size", "text"),
    [
        (
            {"X": ("FP32", (1,)), "Y": ("FP32", (1,))},
            4,
            "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got 2 inputs "
            "in 'echo' model configuration",
        ),
        (
            {"X": ("FP32", (-1, -1))},
            4,
            "The shape of the raw input 'X' can not be deduced because there are more than one "
            "variable-sized dimension",
        ),
        ({"X": ("BYTES", (2,))}, 4, RID + "For BYTE datatype raw input 'X', the model must have input shape [1]"),
        ({"X": ("BYTES", (-1,))}, 4, RID + "For BYTE datatype raw input 'X', the model must have input shape [1]"),
        (
            {"X": ("FP32", (-1,))},
            101,
            "Raw input has a byte_size (101 bytes) that exceeds the maximum allowed value of 100 bytes. Use "
            "--http-max-input-size to increase the limit.",
        ),
        (
            {"X": ("FP32", (3,))},
            4,
            "[request id: <id_unknown>] input byte size mismatch for input 'X' for model 'echo'. Expected 12, got 4",
        ),
    ],
)
def test_raw_request_that_cannot_be_deduced(make_caller: MakeCaller, inputs: Any, size: int, text: str) -> None:
    caller = make_caller(inputs, http_max_input_size=100)
    reply, body = caller.send("POST", "/v2/models/echo/infer", b"x" * size, {"Inference-Header-Content-Length": "0"})
    assert (reply.status, error_of(body)) == (400, text)


# ---------------------------------------------------------------------------------------- refusals

FOUR = {"X": ("FP32", (4,))}
SOURCES = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)
SHAPE_TYPE = "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"
COUNT = "Unable to parse 'data': Shape does not match true shape of 'data' field"
LEAF = "Unable to parse 'data': attempt to access JSON non-number as double"


@pytest.mark.parametrize(
    ("entry", "status", "text"),
    [
        (tensor("X", "FP32", [4]), 400, SOURCES + "no field is set"),
        (
            tensor("X", "FP32", [4], data=[], parameters={"binary_data_size": 1}),
            400,
            SOURCES + "set 'data' 'binary_data_size'",
        ),
        (
            tensor("X", "FP32", [4], parameters={"shared_memory_region": "r"}),
            404,
            "Unable to find shared memory region: 'r'",
        ),
        (tensor("X", "FP32", [-4], data=[1]), 500, SHAPE_TYPE),
        (tensor("X", "FP32", [4.0], data=[1]), 500, SHAPE_TYPE),
        (tensor("X", "FP32", [True], data=[1]), 500, SHAPE_TYPE),
        (tensor("X", "FP32", ["4"], data=[1]), 500, SHAPE_TYPE),
        (tensor("X", "FP32", [4], data=[1, 2, 3, "4"]), 500, LEAF),
        (tensor("X", "FP32", [4], data=[1, 2, 3, True]), 500, LEAF),
        (tensor("X", "FP32", [4], data=[1, 2, 3, None]), 500, LEAF),
        (tensor("X", "FP32", [4], data=7), 500, "Unable to parse 'data': attempt to access JSON non-array as array"),
        (tensor("X", "FP16", [4], data=7), 500, "Unable to parse 'data': attempt to access JSON non-array as array"),
        (tensor("X", "FP32", [4], data=[1] * 5), 500, COUNT),
        (tensor("X", "FP32", [4], data=[1] * 3), 500, COUNT),
        (tensor("X", "FP32", [4], data=[]), 500, COUNT),
        (tensor("X", "BOOL", [4], data=[[], []]), 500, COUNT),
        (tensor("X", "FP32", [4], data=[1, 2, 3, 4, "5"]), 500, COUNT),
        (tensor("X", "FP32", [4], data=["1"]), 500, LEAF),
        (tensor("X", "FP32", [4], data=[1, "2", 3, 4, 5]), 500, LEAF),
        (
            tensor("X", "BYTES", [1], data=["a", "b", 3]),
            500,
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
        ),
        (
            tensor("X", "BOOL", [1], data=[1]),
            500,
            "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
        ),
        (
            tensor("X", "UINT8", [1], data=[-1]),
            500,
            "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            tensor("X", "INT32", [1], data=[1.0]),
            500,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        ),
        (
            tensor("X", "INT64", [1], data=[2**63]),
            500,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        ),
        (
            tensor("X", "FP16", [1], data=[1]),
            400,
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input X",
        ),
        (
            tensor("X", "BF16", [1], data=[1]),
            400,
            "receiving BF16 data via JSON is not supported. Please use the binary data format for input X",
        ),
        (tensor("X", "FP31", [1], data=[1]), 400, "invalid datatype for input X"),
        (
            tensor("X", "FP32", [2**31, 2**31, 2], data=[1]),
            400,
            "invalid shape for input 'X': shape [2147483648,2147483648,2] causes total element count to exceed "
            "maximum size of 9223372036854775807",
        ),
        (
            tensor("X", "FP64", [2**61], data=[1]),
            400,
            "byte size overflow for input 'X': element count (2305843009213693952) * data type size (8) exceeds "
            "maximum allowed size (9223372036854775807)",
        ),
        (
            tensor("X", "FP32", [2**30], data=[1]),
            400,
            "JSON input 'X' has a byte_size (4294967296 bytes) that exceeds the maximum allowed value of 67108864 "
            "bytes. Use --http-max-input-size to increase the limit.",
        ),
        (
            binary("X", "FP32", [4], 16),
            400,
            "unexpected size for input 'X', expecting 16 additional bytes for model 'echo'",
        ),
        (
            tensor("X", "FP32", [4], parameters={"binary_data_size": -1}),
            500,
            "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"name": "X", "shape": [4], "data": []},
            500,
            "Unable to parse 'datatype': attempt to access non-existing object member 'datatype'",
        ),
        (
            {"name": 1, "datatype": "FP32", "shape": [4]},
            500,
            "Unable to parse 'name': attempt to access JSON non-string as string",
        ),
    ],
)
def test_bad_input_is_refused(make_caller: MakeCaller, entry: dict[str, Any], status: int, text: str) -> None:
    reply, body = make_caller(FOUR).infer({"inputs": [entry]})
    assert (reply.status, error_of(body)) == (status, text)


GOOD = [tensor("X", "FP32", [4], data=[1, 2, 3, 4])]


@pytest.mark.parametrize(
    ("document", "status", "text"),
    [
        (b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b"{}", 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (b"[]", 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({"inputs": 1}, 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": GOOD * 2}, 400, "[request id: <id_unknown>] input 'X' already exists in request"),
        ({"id": 1, "inputs": GOOD}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        (
            {"inputs": GOOD, "parameters": {"triton_x": 1}},
            400,
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            {"inputs": GOOD, "parameters": {"p": [1]}},
            400,
            "parameter 'p' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"inputs": GOOD, "parameters": {"priority": -1}},
            500,
            "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ({"inputs": GOOD, "outputs": [{"name": "Z"}]}, 400, "unexpected inference output 'Z' for model 'echo'"),
        (
            {
                "inputs": GOOD,
                "outputs": [{"name": "X", "parameters": {"shared_memory_region": "r", "classification": 1}}],
            },
            400,
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            {
                "inputs": GOOD,
                "outputs": [{"name": "X", "parameters": {"shared_memory_region": "r", "binary_data": True}}],
            },
            400,
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
        (b'{"x":1e309}', 500, "failed to parse the request JSON buffer: Number too big to be stored in double. at 5"),
    ],
)
def test_bad_document_is_refused(make_caller: MakeCaller, document: Any, status: int, text: str) -> None:
    reply, body = make_caller(FOUR).infer(document)
    assert (reply.status, error_of(body)) == (status, text)


#: Bodies that are no JSON, and what Triton 2.51 answers.
NO_JSON = [
    (b"[...]", "Invalid value. at 1"),
    (b'{"inputs":[{"data":[1,2,...]}]}', "Invalid value. at 24"),
    (b"[-]", "Invalid value. at 2"),
    (b'{"a":1.}', "Miss fraction part in number. at 7"),
    (b'{"a":1e}', "Miss exponent in number. at 7"),
    (b"nan", "Invalid value. at 1"),
    (b'{"a":tru}', "Invalid value. at 8"),
    (b"[1,]", "Invalid value. at 3"),
    (b'{"a":1,}', "Missing a name for object member. at 7"),
    (b"{'a':1}", "Missing a name for object member. at 1"),
    (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
    (b'{"a":1 "b":2}', "Missing a comma or '}' after an object member. at 7"),
    (b"[1 2]", "Missing a comma or ']' after an array element. at 3"),
    (b'{"a":1}}', "The document root must not be followed by other values. at 7"),
    (b'{"a":"\\x"}', "Invalid escape character in string. at 6"),
    (b'{"a":"\\ud800"}', "The surrogate pair in string is invalid. at 6"),
]


@pytest.mark.parametrize(("body", "text"), NO_JSON, ids=[repr(body) for body, _ in NO_JSON])
def test_invalid_json_is_refused_in_tritons_words(make_caller: MakeCaller, body: bytes, text: str) -> None:
    reply, answer = make_caller(FOUR).infer(body)
    assert (reply.status, error_of(answer)) == (500, f"failed to parse the request JSON buffer: {text}")


@pytest.mark.parametrize("field", ["sequence_id", "priority", "timeout"])
@pytest.mark.parametrize("value", ["1.5", "-1", "1e309", "true", "null", "18446744073709551616", "[]"])
def test_number_fields_take_unsigned_integers_only(make_caller: MakeCaller, field: str, value: str) -> None:
    text = f'{{"parameters":{{"{field}":{value}}},"inputs":{orjson.dumps(GOOD).decode()}}}'
    reply, body = make_caller(FOUR).infer(text.encode())
    assert reply.status == 500
    assert error_of(body)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("", "Unable to parse Inference-Header-Content-Length, got: "),
        ("x", "Unable to parse Inference-Header-Content-Length, got: x"),
        ("5, 5", "Unable to parse Inference-Header-Content-Length, got: 5, 5"),
        (
            "9" * 99,
            "Unable to parse Inference-Header-Content-Length, value is out of range [ -2147483648, 2147483647 ], got: "
            + "9" * 99,
        ),
        ("-1", "inference header size should be in range (0, 3), got: -1"),
        ("4", "inference header size should be in range (0, 3), got: 4"),
    ],
)
def test_header_length_out_of_range(make_caller: MakeCaller, value: str, text: str) -> None:
    reply, body = make_caller(FOUR).send(
        "POST", "/v2/models/echo/infer", b"{}x", {"Inference-Header-Content-Length": value}
    )
    assert (reply.status, error_of(body)) == (400, text)


def test_left_over_bytes_are_refused(make_caller: MakeCaller) -> None:
    reply, body = make_caller(FOUR).infer({"inputs": [binary("X", "FP32", [4], 16)]}, b"x" * 17)
    assert (reply.status, error_of(body)) == (400, "unexpected additional input data for model 'echo'")


def test_decoupled_model_is_refused(make_caller: MakeCaller) -> None:
    caller = make_caller(FOUR)
    caller.model.decoupled = True
    caller.table.serve(caller.model)
    reply, body = caller.infer({"inputs": GOOD})
    text = "HTTP end point doesn't support models with decoupled transaction policy"
    assert (reply.status, error_of(body)) == (501, text)


def test_two_responses_are_one_too_many(make_caller: MakeCaller) -> None:
    caller = make_caller(FOUR)
    caller.model.holds = True
    replies: list[Any] = []
    caller.model.answer, first = (lambda ticket: None), caller.model.answer
    from headrace.messages.ticket import Ticket
    from headrace_http.message import HttpRequest

    request = HttpRequest("POST", "/v2/models/echo/infer", {}, memoryview(orjson.dumps({"inputs": GOOD})))
    caller.routes.dispatch(request, replies.append)
    (pending,) = caller.model.tickets
    first(Ticket(pending.request, lambda answer, final: pending.respond(answer, False)))
    first(pending)
    assert (replies[0].status, error_of(b"".join(replies[0].parts))) == (500, "expected a single response, got 2")


# ---------------------------------------------------------------------------------------- depth, size, bombs


@pytest.mark.parametrize("depth", [100, 101, 1020, 1_000_000])
def test_deep_data_is_refused_quickly(make_caller: MakeCaller, depth: int) -> None:
    data = b"[" * depth + b"1" + b"]" * depth
    body = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":' + data + b"}]}"
    caller = make_caller(FOUR)
    began = time.process_time()  # of all threads; what a busy machine adds is not ours
    reply, answer = caller.infer(body)
    assert time.process_time() - began < 1
    assert (reply.status, error_of(answer)) == (400, "JSON nesting depth exceeds maximum allowed limit (100)")


def test_ninety_nine_levels_are_fine(make_caller: MakeCaller) -> None:
    data = b"[" * 99 + b"1" + b"]" * 99
    body = b'{"inputs":[{"name":"X","datatype":"INT8","shape":[1],"data":' + data + b"}]}"
    assert make_caller({"X": ("INT8", (1,))}).infer(body)[0].status == 200


def test_uneven_nesting_is_bounded_too(make_caller: MakeCaller) -> None:
    data = b"[1," * 100 + b"1" + b"]" * 100
    body = b'{"inputs":[{"name":"X","datatype":"INT8","shape":[101],"data":' + data + b"}]}"
    assert make_caller({"X": ("INT8", (101,))}).infer(body)[0].status == 400


def test_deep_data_with_literals_is_refused(make_caller: MakeCaller) -> None:
    body = b'{"inputs":[{"data":[NaN,' + b"[" * 100_000 + b"]" * 100_000 + b"]}]}"
    assert make_caller(FOUR).infer(body)[0].status == 400


def test_hundred_thousand_outputs_are_refused_before_the_model_runs(make_caller: MakeCaller) -> None:
    caller = make_caller(FOUR)
    reply, _ = caller.infer({"inputs": GOOD, "outputs": [{"name": "X"}] * 100_000})
    assert reply.status == 400
    assert not caller.model.requests


@pytest.mark.parametrize("count", [2**31, 2**64])
def test_absurd_class_count_is_refused_before_the_model_runs(make_caller: MakeCaller, count: int) -> None:
    caller = make_caller(FOUR)
    body = b'{"inputs":%s,"outputs":[{"name":"X","parameters":{"classification":%d}}]}' % (orjson.dumps(GOOD), count)
    assert caller.infer(body)[0].status in (400, 500)
    assert not caller.model.requests


@pytest.mark.parametrize("shape", [[1] * 65, [0, 2**62, 2**62], [2**32]])
def test_absurd_shape_of_a_binary_tensor_is_refused(make_caller: MakeCaller, shape: list[int]) -> None:
    reply, _ = make_caller(FOUR).infer({"inputs": [binary("X", "FP32", shape, 4)]}, b"abcd")
    assert reply.status == 400


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_request_and_reply(make_caller: MakeCaller, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    caller = make_caller(FOUR)
    headers = {"Content-Encoding": encoding, "Accept-Encoding": f"identity;q=0.5, {encoding}"}
    reply, body = caller.send("POST", "/v2/models/echo/infer", pack(orjson.dumps({"inputs": GOOD})), headers)
    assert (b"Content-Encoding", encoding.encode()) in reply.headers
    assert result_of(reply, body).as_numpy("X").tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("datatype", ["FP64", "INT64"])
def test_tensor_is_held_to_the_limit_though_its_json_is_shorter(make_caller: MakeCaller, datatype: str) -> None:
    caller = make_caller({"X": (datatype, (-1,))}, http_max_input_size=200)
    document = {"inputs": [tensor("X", datatype, [26], data=[1] * 26)]}
    body = orjson.dumps(document)
    assert len(body) <= 200
    reply, answer = caller.send("POST", "/v2/models/echo/infer", body)
    assert reply.status == 400
    assert error_of(answer) == (
        "JSON input 'X' has a byte_size (208 bytes) that exceeds the maximum allowed value of 200 bytes. Use "
        "--http-max-input-size to increase the limit."
    )


def test_bomb_is_stopped_at_the_limit_and_its_memory_freed(make_caller: MakeCaller) -> None:
    bomb = zlib.compressobj()
    packed = b"".join(bomb.compress(b"\0" * 2**20) for _ in range(64)) + bomb.flush()
    caller = make_caller(FOUR, http_max_input_size=8 * 2**20)
    tracemalloc.start()
    try:
        reply, body = caller.send("POST", "/v2/models/echo/infer", packed, {"Content-Encoding": "deflate"})
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (reply.status, error_of(body)) == (
        400,
        "Decompressed data size exceeds the maximum allowed value of 8388608 bytes. Use --http-max-input-size to "
        "increase the limit.",
    )
    assert peak < 24 * 2**20
    assert left < 2**20


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "nothing to be decompressed"),
        (gzip.compress(b"{}" * 99, mtime=0)[:-9], "compressed request body is truncated"),
        (b"plain", "compressed request body is malformed"),
    ],
)
def test_broken_compression_is_refused(make_caller: MakeCaller, body: bytes, text: str) -> None:
    reply, answer = make_caller(FOUR).send("POST", "/v2/models/echo/infer", body, {"Content-Encoding": "gzip"})
    assert reply.status == 400
    assert error_of(answer).startswith(text)


def test_unknown_encoding_says_which_are_known(make_caller: MakeCaller) -> None:
    reply, body = make_caller(FOUR).infer({"inputs": GOOD}, headers={"Content-Encoding": "br"})
    assert (reply.status, error_of(body)) == (501, "Unsupported compression type")
    assert (b"Accept-Encoding", b"gzip, deflate") in reply.headers


# ---------------------------------------------------------------------------------------- forwarded headers


def test_headers_that_match_become_parameters(make_caller: MakeCaller) -> None:
    caller = make_caller(FOUR, http_header_forward_pattern="my_.*")
    caller.infer({"inputs": GOOD, "parameters": {"a": 1}}, headers={"My_Key": "v", "Other": "w"})
    assert caller.model.requests[0].parameters == {"a": 1, "My_Key": "v"}


@pytest.mark.parametrize("name", ["Sequence_id", "triton_x", "priority"])
def test_reserved_headers_are_refused(make_caller: MakeCaller, name: str) -> None:
    reply, body = make_caller(FOUR, http_header_forward_pattern=".*").infer({"inputs": GOOD}, headers={name: "1"})
    text = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert (reply.status, error_of(body)) == (400, text)
