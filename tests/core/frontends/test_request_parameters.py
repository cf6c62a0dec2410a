"""The parameters of a request mean the same over both protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
import pytest

from headrace.errors import HeadraceError, InvalidArgument
from headrace.messages.request import InferRequest
from headrace_grpc import decode as grpc
from headrace_grpc import wire
from headrace_grpc.grpc_service_pb2 import ModelInferRequest
from headrace_http import infer_request as http

Decode = Callable[[Mapping[str, Any]], InferRequest]
NAMES = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout_us", "parameters")


def over_http(parameters: Mapping[str, Any]) -> InferRequest:
    entry = {"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}
    body = orjson.dumps({"inputs": [entry], "parameters": parameters})
    return http.decode("m", "", memoryview(body), len(body), 1 << 20).request


def over_grpc(parameters: Mapping[str, Any]) -> InferRequest:
    sent = ModelInferRequest(model_name="m")
    sent.inputs.add(name="x", datatype="FP32", shape=[1])
    sent.raw_input_contents.append(np.zeros(1, np.float32).tobytes())
    fields: dict[type, str] = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        setattr(sent.parameters[name], fields[type(value)], value)
    return grpc.decode(wire.unpack(sent.SerializeToString())).request


def meaning(request: InferRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in NAMES}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, {}),
        ({"sequence_id": 7, "sequence_start": True, "sequence_end": True}, {}),
        ({"sequence_id": "seven"}, {}),
        ({"priority": 2, "timeout": 1000}, {"priority": 2, "timeout_us": 1000}),
        ({"priority": 2**63 - 1, "timeout": 2**63 - 1}, {"priority": 2**63 - 1, "timeout_us": 2**63 - 1}),
        ({"color": "red", "count": -1, "share": 0.5, "whole": True}, None),
        ({"headers": "x", "Priority": 3, "sequence": 1, "trito_": "t"}, None),
    ],
)
def test_both_protocols_read_the_same_out_of_the_same(
    parameters: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    default = {"sequence_id": 0, "sequence_start": False, "sequence_end": False, "priority": 0, "timeout_us": 0}
    read = {**default, "parameters": parameters} if expected is None else {**default, "parameters": {}, **expected}
    if expected == {}:
        read |= parameters
    assert meaning(over_http(parameters)) == meaning(over_grpc(parameters)) == read


@pytest.mark.parametrize("name", ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout"])
@pytest.mark.parametrize("decode", [over_http, over_grpc])
def test_a_value_of_a_type_that_no_meaning_has_is_refused(decode: Decode, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'{name}'"):
        decode({name: 0.5})


@pytest.mark.parametrize("name", ["priority", "timeout"])
@pytest.mark.parametrize("decode", [over_http, over_grpc])
def test_counts_may_not_be_negative(decode: Decode, name: str) -> None:
    with pytest.raises(HeadraceError, match=f"'{name}'"):
        decode({name: -1})


@pytest.mark.parametrize(
    ("decode", "text"),
    [
        (over_http, " and should not be specified."),
        (
            over_grpc,
            ". Only the following keys starting with 'triton_' are allowed: triton_enable_empty_final_response",
        ),
    ],
)
def test_reserved_names_are_refused(decode: Decode, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode({"triton_x": True})
    assert refused.value.message == f"parameter keys starting with 'triton_' are reserved for Triton usage{text}"


def test_the_switch_of_one_protocol_is_none_of_the_other() -> None:
    assert over_grpc({"binary_data_output": True}).parameters == {"binary_data_output": True}
    with pytest.raises(InvalidArgument, match="reserved"):
        over_http({"triton_enable_empty_final_response": True})
