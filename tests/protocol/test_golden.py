"""Bytes on the wire, spelled out from the protocol: HTTP's binary extension, and protobuf for gRPC.

Nothing here was copied from an answer of Headrace. Field numbers are those of grpc_service.proto
(docs/spec/behaviours.md section 2.1); a key is ``number << 3 | type``, with type 2 for fields with a length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

ONE, TWO = b"\x00\x00\x80\x3f", b"\x00\x00\x00\x40"  # 1.0 and 2.0 as little-endian IEEE 754 singles


def test_an_http_exchange_with_binary_tensors(http_server: Any, send: Callable[..., Any]) -> None:
    document = (
        b'{"id":"7","inputs":[{"name":"IN","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}],'
        b'"outputs":[{"name":"OUT","parameters":{"binary_data":true}}]}'
    )
    headers = {"Inference-Header-Content-Length": str(len(document)), "Content-Type": "application/octet-stream"}
    reply = send(http_server, "POST", "/v2/models/batched/infer", document + ONE + TWO + ONE + TWO, headers)
    answer = (
        b'{"id":"7","model_name":"batched","model_version":"1",'
        b'"outputs":[{"name":"OUT","datatype":"FP32","shape":[1,4],"parameters":{"binary_data_size":16}}]}'
    )
    assert reply.body == answer + ONE + TWO + ONE + TWO
    assert reply.headers["Inference-Header-Content-Length"] == str(len(answer))
    assert reply.headers["Content-Type"] == "application/octet-stream"


def test_an_http_exchange_with_strings(http_server: Any, send: Callable[..., Any]) -> None:
    document = (
        b'{"inputs":[{"name":"IN","shape":[2],"datatype":"BYTES","data":["a","\xc3\xa4"]}],'
        b'"parameters":{"binary_data_output":true}}'
    )
    reply = send(http_server, "POST", "/v2/models/echo_bytes/infer", document)
    assert reply.body.endswith(b'"parameters":{"binary_data_size":11}}]}\x01\x00\x00\x00a\x02\x00\x00\x00\xc3\xa4')


def test_a_grpc_exchange(server: Any) -> None:
    model = b"\x0a\x07batched"  # 1: model_name
    values = b"\x10" + ONE + TWO + ONE + TWO
    request = model + (
        b"\x1a\x017"  # 3: id
        b"\x2a\x0e"  # 5: inputs, 14 bytes
        b"\x0a\x02IN"  # .. 1: name
        b"\x12\x04FP32"  # .. 2: datatype
        b"\x1a\x02\x01\x04"  # .. 3: shape, packed
        b"\x3a" + values  # 7: raw_input_contents
    )
    answer = model + (
        b"\x12\x011"  # 2: model_version
        b"\x1a\x017"  # 3: id
        b"\x2a\x0f"  # 5: outputs, 15 bytes
        b"\x0a\x03OUT"
        b"\x12\x04FP32"
        b"\x1a\x02\x01\x04"
        b"\x32" + values  # 6: raw_output_contents
    )  # fmt: skip
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        assert channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)(request) == answer
