"""Raw HTTP: routes, headers, bodies and refusals, to the letter of docs/spec/behaviours.md sections 0 and 1."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace
    from tests.protocol.conftest import Reply

    Send = Callable[..., Reply]

MAX = 1 << 20  # --http-max-input-size of the server
DATA = {"name": "IN", "datatype": "FP32", "shape": [4], "data": [1.0, 2.5, -3.0, 4.0]}
ROW = {**DATA, "shape": [1, 4]}
INFER = "/v2/models/echo_fp32/infer"
LENGTH = "Inference-Header-Content-Length"


def body(*inputs: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"inputs": list(inputs), **rest}


def changed(tensor: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return ``tensor`` with ``fields``, without those that are None."""
    return {name: value for name, value in {**tensor, **fields}.items() if value is not None}


def binary(document: dict[str, Any], tail: bytes, **headers: str) -> tuple[bytes, dict[str, str]]:
    """A body with ``tail`` behind its JSON, and the headers that say so."""
    text = json.dumps(document).encode()
    return text + tail, {LENGTH: str(len(text)), **headers}


# ---------------------------------------------------------------------- routes


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/add/ready",
                                  "/v2/models/versions/versions/3/ready"])  # fmt: skip
def test_health_is_an_empty_success(http_server: Headrace, send: Send, path: str) -> None:
    reply = send(http_server, "GET", path)
    assert (reply.status, reply.body) == (200, b"")


@pytest.mark.parametrize(("path", "body"), [
    ("/v2/health/live", {"live": True}), ("/v2/health/ready", {"ready": True}),
    ("/v2/models/add/ready", {"name": "add", "ready": True}),
])  # fmt: skip
def test_health_has_the_body_of_the_open_inference_protocol_for_a_client_that_accepts_one(
    http_server: Headrace, send: Send, path: str, body: dict[str, object]
) -> None:
    reply = send(http_server, "GET", path, headers={"Accept": "application/json"})
    assert (reply.status, json.loads(reply.body)) == (200, body)


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/", "/v2/health", "/v2/health/live/", "/v2/models/add/", "/v2/models",
                                  "/v2/models//infer", "/v2/models/add/versions/x/ready", "/v2/models/add/predict",
                                  "/v2//health/live", "/v2/models/a/b/ready", "/V2/health/live",
                                  "/v2/models/../add"])  # fmt: skip
def test_a_path_that_is_none_of_ours_is_not_found(http_server: Headrace, send: Send, path: str) -> None:
    reply = send(http_server, "GET", path)
    assert (reply.status, reply.error) == (404, "Not Found")


@pytest.mark.parametrize(("method", "path"), [("POST", "/v2"), ("POST", "/v2/health/live"), ("GET", INFER),
                                              ("DELETE", "/v2/models/add"), ("PUT", "/v2/models/add/config"),
                                              ("GET", "/v2/repository/index"), ("POST", "/v2/models/stats"),
                                              ("GET", "/v2/repository/models/add/load")])  # fmt: skip
def test_the_wrong_method_is_not_allowed(http_server: Headrace, send: Send, method: str, path: str) -> None:
    reply = send(http_server, method, path)
    assert (reply.status, reply.error) == (405, "Method Not Allowed")


def test_a_query_is_ignored(http_server: Headrace, send: Send) -> None:
    assert send(http_server, "GET", "/v2/health/live?probe=1&x=/v2").status == 200


UNKNOWN = "Request for unknown model: "
BAD_VERSION = "failed to get model version from specified version string '99999999999999999999'"
LOOKUPS = [
    ("/v2/models/nosuch{}", 404, f"{UNKNOWN}'nosuch' is not found"),
    ("/v2/models/add/versions/7{}", 404, f"{UNKNOWN}'add' version 7 is not found"),
    ("/v2/models/%61dd{}", 404, f"{UNKNOWN}'%61dd' is not found"),  # as received: nothing is decoded
    ("/v2/models/add/versions/99999999999999999999{}", 400, BAD_VERSION),
]


@pytest.mark.parametrize(("path", "status", "text"), LOOKUPS)
@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("GET", "/config"), ("GET", "/ready"), ("POST", "/infer")])
def test_a_model_that_is_not_there(
    http_server: Headrace, send: Send, method: str, suffix: str, path: str, status: int, text: str
) -> None:
    reply = send(http_server, method, path.format(suffix), body(DATA) if method == "POST" else None)
    assert reply.status == status
    assert reply.error.startswith(text)


@pytest.mark.parametrize(("path", "text"), [
    ("/v2/models/nosuch/stats", "requested model 'nosuch' is not available"),
    ("/v2/models/add/versions/9/stats", "requested model version is not available for model 'add'"),
])  # fmt: skip
def test_statistics_of_an_unknown_model_are_a_bad_request(
    http_server: Headrace, send: Send, path: str, text: str
) -> None:
    reply = send(http_server, "GET", path)
    assert (reply.status, reply.error) == (400, text)


def test_statistics_of_all_models_name_each_version_once(http_server: Headrace, send: Send) -> None:
    entries = send(http_server, "GET", "/v2/models/stats").json["model_stats"]
    names = [(entry["name"], entry["version"]) for entry in entries]
    assert len(names) == len(set(names))
    assert {("versions", "1"), ("versions", "3"), ("add", "1")} <= set(names)
    times = {"success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"}
    for entry in entries:
        assert {"last_inference", "inference_count", "execution_count", "batch_stats"} <= entry.keys()
        assert set(entry["inference_stats"]) == times
        assert all(set(each) == {"count", "ns"} for each in entry["inference_stats"].values())


def test_the_config_prints_every_primitive_and_dims_as_numbers(http_server: Headrace, send: Send) -> None:
    config = send(http_server, "GET", "/v2/models/batched/config").json
    assert config["input"] == [
        {"name": "IN", "data_type": "TYPE_FP32", "format": "FORMAT_NONE", "dims": [4], "is_shape_tensor": False,
         "allow_ragged_batch": False, "optional": False, "is_non_linear_format_io": False}
    ]  # fmt: skip
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert config["dynamic_batching"]["preserve_ordering"] is False
    assert config["default_model_filename"] == ""
    assert config["instance_group"][0]["kind"] == "KIND_CPU"


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/repository/anything/index"])
@pytest.mark.parametrize("content", [None, b"", {}, {"ready": False}, {"ready": True}])
def test_the_index_lists_models(http_server: Headrace, send: Send, path: str, content: Any) -> None:
    reply = send(http_server, "POST", path, content)
    assert reply.headers["Content-Type"] == "application/json"
    assert {"name": "add", "version": "1", "state": "READY"} in reply.json


@pytest.mark.parametrize("ready", ["x", 1, None, [], {}])
def test_the_index_takes_only_a_boolean(http_server: Headrace, send: Send, ready: object) -> None:
    reply = send(http_server, "POST", "/v2/repository/index", {"ready": ready})
    assert (reply.status, reply.error) == (400, "Invalid value for 'ready': expected a boolean")


@pytest.mark.parametrize("action", ["load", "unload"])
def test_a_repository_name_is_not_supported_in_control_calls(http_server: Headrace, send: Send, action: str) -> None:
    reply = send(http_server, "POST", f"/v2/repository/mine/models/add/{action}", {})
    assert (reply.status, reply.error) == (501, "'repository_name' specification is not supported")
    refused = send(http_server, "POST", f"/v2/repository/models/add/{action}")
    assert refused.status == 503
    assert refused.error == (
        "explicit model load / unload is not allowed in model control mode 'none'; start the server with "
        "--model-control-mode=explicit"
    )


# ---------------------------------------------------------------------- answers


def test_an_answer_in_json_has_tritons_keys_in_tritons_order(http_server: Headrace, send: Send) -> None:
    reply = send(http_server, "POST", INFER, body(DATA, id="a"))
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.headers[LENGTH] is None
    assert reply.body == (
        b'{"id":"a","model_name":"echo_fp32","model_version":"1",'
        b'"outputs":[{"name":"OUT","datatype":"FP32","shape":[4],"data":[1.0,2.5,-3.0,4.0]}]}'
    )


def test_an_empty_id_is_left_out(http_server: Headrace, send: Send) -> None:
    assert "id" not in send(http_server, "POST", INFER, body(DATA, id="")).json


def test_fp32_is_printed_as_the_double_that_it_is(http_server: Headrace, send: Send) -> None:
    reply = send(http_server, "POST", INFER, body(changed(DATA, shape=[1], data=[0.1])))
    assert b'"data":[0.10000000149011612]' in reply.body


def test_numbers_that_are_none_are_read_and_printed_bare(http_server: Headrace, send: Send) -> None:
    text = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[4],"data":[NaN,Infinity,-Infinity,Inf]}]}'
    reply = send(http_server, "POST", INFER, text)
    assert reply.status == 200
    assert b'"data":[NaN,Infinity,-Infinity,Infinity]' in reply.body


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3, 4]]], [1, [2, [3, [4]]]]])
def test_nesting_need_not_match_the_shape(http_server: Headrace, send: Send, data: list[Any]) -> None:
    reply = send(http_server, "POST", INFER, body(changed(DATA, data=data)))
    assert reply.json["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("value", "expected"), [(300, 44), (-1, -1), (128, -128), (2**40 + 5, 5)])
def test_integers_are_cut_to_their_width(http_server: Headrace, send: Send, value: int, expected: int) -> None:
    reply = send(http_server, "POST", "/v2/models/echo_int8/infer",
                 body({"name": "IN", "datatype": "INT8", "shape": [1], "data": [value]}))  # fmt: skip
    assert reply.json["outputs"][0]["data"] == [expected]


@pytest.mark.parametrize(("parameters", "outputs", "is_binary"), [
    ({}, [], False),
    ({"binary_data_output": True}, [], True),
    ({"binary_data_output": True}, [{"name": "OUT"}], False),  # listed: the default does not apply
    ({}, [{"name": "OUT", "parameters": {"binary_data": True}}], True),
    ({"binary_data_output": True}, [{"name": "OUT", "parameters": {"binary_data": False}}], False),
])  # fmt: skip
def test_binary_output_is_decided_per_output_then_per_request(
    http_server: Headrace, send: Send, parameters: Any, outputs: Any, is_binary: bool
) -> None:
    reply = send(http_server, "POST", INFER, body(DATA, parameters=parameters, outputs=outputs))
    assert (LENGTH in reply.headers) is is_binary
    length = int(reply.headers[LENGTH] or len(reply.body))
    output = json.loads(reply.body[:length])["outputs"][0]
    if is_binary:
        assert reply.headers["Content-Type"] == "application/octet-stream"
        assert output == {"name": "OUT", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16}}
        assert reply.body[length:] == struct.pack("<4f", *DATA["data"])
    else:
        assert output["data"] == DATA["data"]


def test_binary_and_json_outputs_stand_side_by_side(http_server: Headrace, send: Send) -> None:
    inputs = [{"name": n, "datatype": "FP32", "shape": [1, 2], "data": [k, k]} for n, k in (("IN0", 1.0), ("IN1", 2.0))]
    outputs = [{"name": "OUT1", "parameters": {"binary_data": True}}, {"name": "OUT0"}]
    reply = send(http_server, "POST", "/v2/models/pair/infer", body(*inputs, outputs=outputs))
    length = int(reply.headers[LENGTH])
    first, second = json.loads(reply.body[:length])["outputs"]
    assert (first["name"], first["parameters"]) == ("OUT1", {"binary_data_size": 8})
    assert (second["name"], second["data"]) == ("OUT0", [1.0, 1.0])
    assert reply.body[length:] == struct.pack("<2f", 2.0, 2.0)


def test_an_answer_whose_binary_outputs_are_empty_is_json(http_server: Headrace, send: Send) -> None:
    reply = send(http_server, "POST", INFER, body(changed(DATA, shape=[0]), parameters={"binary_data_output": True}))
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.headers[LENGTH] is None
    assert reply.json["outputs"][0]["parameters"] == {"binary_data_size": 0}


def test_data_of_a_tensor_without_elements_is_not_read(http_server: Headrace, send: Send) -> None:
    assert send(http_server, "POST", INFER, body(changed(DATA, shape=[0], data=["what", {}]))).status == 200


def test_binary_data_of_a_tensor_without_elements_is_refused(http_server: Headrace, send: Send) -> None:
    """As by Triton 2.51, which reads no JSON data there and counts binary data."""
    tensor = changed(DATA, shape=[0], data=None, parameters={"binary_data_size": 8})
    reply = send(http_server, "POST", INFER, *binary(body(tensor), bytes(8)))
    assert (reply.status, reply.error) == (
        400, RID + "input byte size mismatch for input 'IN' for model 'echo_fp32'. Expected 0, got 8"
    )  # fmt: skip


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_sent_in_binary_only(http_server: Headrace, send: Send, datatype: str) -> None:
    tensor = {"name": "IN", "datatype": datatype, "shape": [2], "parameters": {"binary_data_size": 4}}
    path = f"/v2/models/echo_{datatype.lower()}/infer"
    reply = send(http_server, "POST", path, *binary(body(tensor), bytes(4)))
    assert reply.status == 400
    assert reply.error == (
        f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
    )
    document = body(tensor, parameters={"binary_data_output": True})
    assert send(http_server, "POST", path, *binary(document, b"\x01\x02\x03\x04")).body.endswith(b"\x01\x02\x03\x04")


# ---------------------------------------------------------------------- raw binary requests


@pytest.mark.parametrize(("model", "content", "shape"), [("echo_fp32", bytes(8), [2]), ("batched", bytes(16), [1, 4]),
                                                         ("matrix", bytes(24), [2, 3])])  # fmt: skip
def test_a_raw_request_is_its_one_tensor(
    http_server: Headrace, send: Send, model: str, content: bytes, shape: list[int]
) -> None:
    reply = send(http_server, "POST", f"/v2/models/{model}/infer", content, {LENGTH: "0"})
    assert reply.status == 200, reply.body
    length = int(reply.headers[LENGTH])
    assert json.loads(reply.body[:length])["outputs"][0]["shape"] == shape
    assert reply.body[length:] == content


def test_a_raw_request_of_a_model_with_two_inputs_is_refused(http_server: Headrace, send: Send) -> None:
    reply = send(http_server, "POST", "/v2/models/pair/infer", bytes(16), {LENGTH: "0"})
    assert reply.status == 400
    assert reply.error == (
        "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in "
        "'pair' model configuration"
    )


def test_a_raw_request_over_the_limit_is_refused(http_server: Headrace, send: Send) -> None:
    reply = send(http_server, "POST", INFER, bytes(MAX + 4), {LENGTH: "0"})
    assert (reply.status, reply.error) == (
        400,
        f"Raw input has a byte_size ({MAX + 4} bytes) that exceeds the maximum allowed value of {MAX} bytes. "
        "Use --http-max-input-size to increase the limit.",
    )


# ---------------------------------------------------------------------- compression


UNPACK: dict[str | None, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}
PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("named", PACK)
@pytest.mark.parametrize("packed", PACK)
def test_either_compression_is_read_under_either_name(
    http_server: Headrace, send: Send, named: str, packed: str
) -> None:
    text, headers = binary(body(changed(DATA, data=None, parameters={"binary_data_size": 16})), bytes(16))
    reply = send(http_server, "POST", INFER, PACK[packed](text), {**headers, "Content-Encoding": named})
    assert reply.json["outputs"][0]["data"] == [0.0] * 4


@pytest.mark.parametrize(("accepted", "chosen"), [
    ("gzip", "gzip"), ("deflate", "deflate"), ("gzip, deflate", "gzip"), ("deflate, gzip", "deflate"),
    ("gzip;q=0.5, deflate;q=0.8", "deflate"), ("gzip;q=0.5, identity", None), ("br", None), ("identity", None),
    ("gzip;q=x, deflate;q=0.1", "deflate"), ("*", None),
])  # fmt: skip
def test_the_heaviest_encoding_is_chosen(http_server: Headrace, send: Send, accepted: str, chosen: str | None) -> None:
    reply = send(http_server, "POST", INFER, body(DATA), {"Accept-Encoding": accepted})
    assert reply.headers["Content-Encoding"] == chosen
    assert json.loads(UNPACK[chosen](reply.body))["outputs"][0]["data"] == DATA["data"]


def test_nothing_else_is_compressed(http_server: Headrace, send: Send) -> None:
    assert send(http_server, "GET", "/v2", headers={"Accept-Encoding": "gzip"}).headers["Content-Encoding"] is None


@pytest.mark.parametrize("encoding", ["br", "GZIP", "gzip, deflate"])
def test_other_encodings_are_refused_with_the_known_ones(http_server: Headrace, send: Send, encoding: str) -> None:
    reply = send(http_server, "POST", INFER, b"x", {"Content-Encoding": encoding})
    assert (reply.status, reply.error) == (501, "Unsupported compression type")
    assert reply.headers["Accept-Encoding"] == "gzip, deflate"


def test_nothing_compressed_is_refused(http_server: Headrace, send: Send) -> None:
    reply = send(http_server, "POST", INFER, b"", {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error) == (400, "nothing to be decompressed")


def test_body_that_unpacks_to_more_than_the_limit_is_refused(http_server: Headrace, send: Send) -> None:
    reply = send(http_server, "POST", INFER, gzip.compress(b" " * (MAX + 1)), {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error) == (
        400,
        f"Decompressed data size exceeds the maximum allowed value of {MAX} bytes. Use --http-max-input-size to "
        "increase the limit.",
    )


# ---------------------------------------------------------------------- refused documents

SET_ONE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
OVERFLOW = "causes total element count to exceed maximum size of 9223372036854775807"
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
RID = "[request id: <id_unknown>] "
REFUSED: list[tuple[str, Any, int, str]] = [
    # not JSON, or not the JSON wanted: 500
    ("echo_fp32", b"", 500, "failed to parse the request JSON buffer: "),
    ("echo_fp32", b"{", 500, "failed to parse the request JSON buffer: "),
    ("echo_fp32", b'{"inputs":[]} x', 500, "failed to parse the request JSON buffer: "),
    ("echo_fp32", b"\xff\xfe", 500, "failed to parse the request JSON buffer: "),
    ("echo_fp32", {}, 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    ("echo_fp32", {"inputs": 3}, 500, "Unable to parse 'inputs'"),
    ("echo_fp32", body(changed(DATA, name=None)), 500, "Unable to parse 'name'"),
    ("echo_fp32", body(changed(DATA, name=5)), 500, "Unable to parse 'name'"),
    ("echo_fp32", body(changed(DATA, datatype=None)), 500, "Unable to parse 'datatype'"),
    ("echo_fp32", body(changed(DATA, shape=None)), 500, "Unable to parse 'shape'"),
    ("echo_fp32", body(changed(DATA, shape=[-4])), 500,
     "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"),
    ("echo_fp32", body(changed(DATA, shape=[4.0])), 500,
     "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"),
    ("echo_fp32", body(changed(DATA, data="text")), 500, "Unable to parse 'data'"),
    ("echo_fp32", body(changed(DATA, data=[1, 2, 3, "4"])), 500, "Unable to parse 'data'"),
    ("echo_fp32", body(changed(DATA, data=[1, 2, 3, 4, 5])), 500,
     "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ("echo_fp32", body(changed(DATA, data=[1, 2, 3])), 500,
     "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ("echo_bytes", body(changed(DATA, datatype="BYTES", data=["a", "b", "c", "d", "e"])), 400,
     "[request id: <id_unknown>] "
     "unexpected number of string elements 5 for inference input 'IN' for model 'echo_bytes', expecting 4"),
    ("echo_bytes", body(changed(DATA, datatype="BYTES", data=["a"])), 400,
     "[request id: <id_unknown>] "
     "expected 4 string elements for inference input 'IN' for model 'echo_bytes', got 1"),
    ("echo_bytes", body(changed(DATA, datatype="BYTES", data=[])), 400,
     "[request id: <id_unknown>] "
     "expected 4 string elements for inference input 'IN' for model 'echo_bytes', got 0"),
    ("echo_bytes", body(changed(DATA, datatype="BYTES")), 500, "Unable to parse JSON bytes array: "),
    ("echo_int32", body(changed(DATA, datatype="INT32", data=[1, 2, 3, 4.5])), 500, "Unable to parse 'data'"),
    ("echo_uint8", body(changed(DATA, datatype="UINT8", data=[1, 2, 3, -4])), 500, "Unable to parse 'data'"),
    ("echo_bool", body(changed(DATA, datatype="BOOL", data=[1, 0, 1, 0])), 500, "Unable to parse 'data'"),
    # understood and refused: 400
    ("echo_fp32", body(changed(DATA, data=None)), 400, SET_ONE + "no field is set"),
    ("echo_fp32", body(changed(DATA, parameters={"binary_data_size": 16})), 400,
     SET_ONE + "set 'data' 'binary_data_size'"),
    ("echo_fp32", body(changed(DATA, datatype="FP33")), 400, "invalid datatype for input IN"),
    ("echo_fp32", body(changed(DATA, datatype="fp32")), 400, "invalid datatype for input IN"),
    ("echo_fp16", body(changed(DATA, datatype="FP16")), 400,
     "receiving FP16 data via JSON is not supported. Please use the binary data format for input IN"),
    ("echo_bf16", body(changed(DATA, datatype="BF16")), 400,
     "receiving BF16 data via JSON is not supported. Please use the binary data format for input IN"),
    ("echo_fp32", body(changed(DATA, shape=[2**31, 2**31, 4])), 400,
     f"invalid shape for input 'IN': shape [2147483648,2147483648,4] {OVERFLOW}"),
    ("echo_fp32", body(changed(DATA, shape=[2**62])), 400,
     f"byte size overflow for input 'IN': element count ({2**62}) * data type size (4) exceeds maximum allowed size "
     "(9223372036854775807)"),
    ("echo_fp32", body(DATA, parameters={"triton_x": 1}), 400, RESERVED),
    ("echo_fp32", body(DATA, parameters={"x": [1]}), 400,
     "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
    ("echo_fp32", body(DATA, outputs=[{"name": "OUT"}, {"name": "OUT"}]), 400,
     RID + "output 'OUT' already exists in request"),
    ("echo_fp32", body(DATA, outputs=[{"name": "NONE"}]), 400,
     "unexpected inference output 'NONE' for model 'echo_fp32'"),
    ("echo_fp32", body(DATA, DATA), 400, RID + "input 'IN' already exists in request"),
    ("echo_fp32", body(changed(DATA, name="ON")), 400, "unexpected inference input 'ON' for model 'echo_fp32'"),
    ("echo_fp32", body(), 400, RID + "expected 1 inputs but got 0 inputs for model 'echo_fp32'. Got input(s) [], but "
     "missing required input(s) ['IN']. Please provide all required input(s)."),
    ("pair", body(changed(ROW, name="IN1", shape=[1, 2], data=[1, 2])), 400,
     RID + "expected 2 inputs but got 1 inputs for model 'pair'. Got input(s) ['IN1'], but missing required input(s) "
     "['IN0']. Please provide all required input(s)."),
    ("optional", body(), 400,
     RID + "expected number of inputs between 1 and 2 but got 0 inputs for model 'optional'. "),
    ("pair", body(changed(ROW, name="IN0", shape=[1, 2], data=[1, 2]), changed(ROW, name="IN1", shape=[2, 2])), 400,
     RID + "input 'IN0' batch size does not match other inputs for 'pair'"),
    ("batched", body(changed(DATA, shape=[9, 4], data=[0.0] * 36)), 400,
     RID + "inference request batch-size must be <= 8 for 'batched'"),
    ("batched", body(changed(DATA, shape=[], data=[1.0])), 400,
     RID + "input 'IN' has no shape but model requires batch dimension for 'batched'"),
    ("echo_fp32", body(changed(DATA, datatype="FP64"), id="a7"), 400,
     "[request id: a7] inference input 'IN' data-type is 'FP64', but model 'echo_fp32' expects 'FP32'"),
    ("batched", body(changed(DATA, shape=[1, 3], data=[1, 2, 3])), 400,
     RID + "unexpected shape for input 'IN' for model 'batched'. Expected [-1,4], got [1,3]. " + NOTE),
    ("matrix", body(changed(DATA, datatype="INT32", shape=[2, 2], data=[1, 2, 3, 4])), 400,
     RID + "unexpected shape for input 'IN' for model 'matrix'. Expected [-1,3], got [2,2]. "),
    ("matrix", body(changed(DATA, datatype="INT32", shape=[1] * 65, data=[1])), 400,
     RID + "unexpected shape for input 'IN' for model 'matrix'. Expected [-1,3], got [1,1"),
    ("classes", body(ROW, outputs=[{"name": "OUT", "parameters": {"shared_memory_region": "r", "classification": 2}}]),
     400, "Output can't set both 'shared_memory_region' and 'classification'"),
    ("classes", body(ROW, outputs=[{"name": "OUT", "parameters": {"shared_memory_region": "r", "binary_data": True}}]),
     400, "Output can't set both 'shared_memory_region' and 'binary_data'"),
    ("echo_bool", body(changed(DATA, datatype="BOOL", data=[True] * 4),
                       outputs=[{"name": "OUT", "parameters": {"classification": 2}}]), 400,
     "class result not available for output due to unsupported type 'BOOL'"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "content", "status", "text"), REFUSED, ids=range(len(REFUSED)))
def test_a_document_is_refused_in_tritons_words(
    http_server: Headrace, send: Send, model: str, content: Any, status: int, text: str
) -> None:
    reply = send(http_server, "POST", f"/v2/models/{model}/infer", content)
    assert (reply.status, reply.error[: len(text)]) == (status, text)


WRONG_NUMBERS = ["1.5", "-1", "1e309", '"1"', "true", "null", "18446744073709551616", "[]"]


@pytest.mark.parametrize("value", WRONG_NUMBERS)
@pytest.mark.parametrize("where", [
    '"parameters":{"priority":%s}', '"parameters":{"timeout":%s}',
    '"outputs":[{"name":"OUT","parameters":{"classification":%s}}]',
])  # fmt: skip
def test_counts_must_be_unsigned_integers(http_server: Headrace, send: Send, where: str, value: str) -> None:
    text = json.dumps(body(DATA))[:-1] + "," + where % value + "}"
    reply = send(http_server, "POST", INFER, text.encode())
    assert reply.status in (400, 500)
    assert reply.error


@pytest.mark.parametrize("value", ["0", *WRONG_NUMBERS])
@pytest.mark.parametrize("field", ["shape", "binary_data_size"])
def test_a_size_that_is_none_is_refused(http_server: Headrace, send: Send, field: str, value: str) -> None:
    """Zero is a size, but not that of these tensors."""
    shape, size = (f"[{value}]", "16") if field == "shape" else ("[4]", value)
    text = (
        f'{{"inputs":[{{"name":"IN","datatype":"FP32","shape":{shape},"parameters":{{"binary_data_size":{size}}}}}]}}'
    )
    reply = send(http_server, "POST", INFER, text.encode() + bytes(16), {LENGTH: str(len(text))})
    assert reply.status in (400, 500)
    assert reply.error


def test_the_json_is_bounded(http_server: Headrace, send: Send) -> None:
    size = MAX + 1
    reply = send(http_server, "POST", INFER, b" " * size)
    assert (reply.status, reply.error) == (
        400,
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {MAX} bytes. Use "
        "--http-max-input-size to increase the limit.",
    )


def test_binary_tensors_are_not_bounded_by_the_size_of_json(http_server: Headrace, send: Send) -> None:
    sent = np.arange(MAX // 2, dtype=np.float32)
    tensor = changed(DATA, shape=[sent.size], data=None, parameters={"binary_data_size": sent.nbytes})
    document = body(tensor, parameters={"binary_data_output": True})
    reply = send(http_server, "POST", INFER, *binary(document, sent.tobytes()))
    assert reply.status == 200
    assert reply.body.endswith(sent.tobytes())


@pytest.mark.parametrize(("tail", "text"), [
    (15, "unexpected size for input 'IN', expecting 1 additional bytes for model 'echo_fp32'"),
    (0, "unexpected size for input 'IN', expecting 16 additional bytes for model 'echo_fp32'"),
    (17, "unexpected additional input data for model 'echo_fp32'"),
])  # fmt: skip
def test_a_tail_of_the_wrong_length_is_refused(http_server: Headrace, send: Send, tail: int, text: str) -> None:
    tensor = changed(DATA, data=None, parameters={"binary_data_size": 16})
    content = json.dumps(body(tensor)).encode() + bytes(tail)
    reply = send(http_server, "POST", INFER, content, {LENGTH: str(len(content) - tail)})
    assert (reply.status, reply.error) == (400, text)


def test_a_binary_size_that_is_not_the_shapes_is_refused(http_server: Headrace, send: Send) -> None:
    tensor = changed(DATA, data=None, parameters={"binary_data_size": 12})
    reply = send(http_server, "POST", INFER, *binary(body(tensor), bytes(12)))
    assert (reply.status, reply.error) == (
        400, RID + "input byte size mismatch for input 'IN' for model 'echo_fp32'. Expected 16, got 12"
    )  # fmt: skip


@pytest.mark.parametrize(("count", "content", "text"), [
    (1, b"\x01\x00", "incomplete string length indicator for inference input 'IN' for model 'echo_bytes', expecting 4 "
     "bytes but only 2 bytes available. Please make sure the string length indicator is in one buffer."),
    (1, b"\x01\x00\x00\x00a\x00\x00\x00\x00",
     "unexpected number of string elements 2 for inference input 'IN' for model 'echo_bytes', expecting 1"),
    (1, b"\x01\x00\x00\x00a" * 40,
     "unexpected number of string elements 2 for inference input 'IN' for model 'echo_bytes', expecting 1"),
    (2, b"\x01\x00\x00\x00a", "expected 2 string elements for inference input 'IN' for model 'echo_bytes', got 1"),
    (1, b"\xff\xff\xff\xffa", ""),
])  # fmt: skip
def test_strings_that_do_not_add_up_are_refused(
    http_server: Headrace, send: Send, count: int, content: bytes, text: str
) -> None:
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": len(content)}}
    reply = send(http_server, "POST", "/v2/models/echo_bytes/infer", *binary(body(tensor), content))
    assert reply.status == 400
    assert reply.error.removeprefix(RID).startswith(text)


@pytest.mark.parametrize(("value", "text"), [
    ("-1", "inference header size should be in range (0, {size}), got: -1"),
    ("100000", "inference header size should be in range (0, {size}), got: 100000"),
    ("abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
    ("12abc", "Unable to parse Inference-Header-Content-Length, got: 12abc"),
    ("", "Unable to parse Inference-Header-Content-Length, got: "),
    ("9" * 99, "Unable to parse Inference-Header-Content-Length, value is out of range [ -2147483648, 2147483647 ], "
     "got: " + "9" * 99),
    ("12, 12", "Unable to parse Inference-Header-Content-Length, got: 12, 12"),
])  # fmt: skip
def test_a_header_length_that_is_none_is_refused(http_server: Headrace, send: Send, value: str, text: str) -> None:
    content = json.dumps(body(DATA)).encode()
    reply = send(http_server, "POST", INFER, content, {LENGTH: value})
    assert (reply.status, reply.error) == (400, text.format(size=len(content)))


def test_one_connection_carries_requests_after_refusals(http_server: Headrace) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", http_server.http, timeout=30)
    for content, status in ((b"{", 500), (json.dumps(body(DATA)).encode(), 200), (b"[]", 500)) * 3:
        connection.request("POST", INFER, content)
        response = connection.getresponse()
        response.read()
        assert response.status == status
    connection.close()


def test_pipelined_requests_are_answered_in_order(http_server: Headrace) -> None:
    with socket.create_connection(("127.0.0.1", http_server.http), timeout=30) as caller:
        for number in range(20):
            content = json.dumps(body(DATA, id=f"n{number}")).encode()
            caller.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n%s" % (
                INFER.encode(), len(content), b"Connection: close\r\n" if number == 19 else b"", content))  # fmt: skip
        with caller.makefile("rb") as stream:
            text = stream.read()
    places = [text.index(b'"id":"n%d"' % number) for number in range(20)]
    assert places == sorted(places)
    assert text.count(b"HTTP/1.1 200") == 20
