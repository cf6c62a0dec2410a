"""The encoding of responses: what no JSON can carry is an error that names it, and what repeats is looked up."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest

from headrace.errors import Code, HeadraceError
from headrace.messages.response import InferResponse
from headrace_http.message import JOIN_BYTES, HttpReply, serialise
from headrace_http.outputs import BINARY, JSON, OutputFormat, encode


@pytest.mark.parametrize("default", [JSON, BINARY])
@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"fine": 1, "a": "\ud800"}, "'a'"),
        ({"a": 2**70}, "'a'"),
        ({"\ud800": 1}, r"'\ud800'"),
    ],
)
def test_a_response_parameter_that_json_can_not_carry_is_named(
    default: OutputFormat, parameters: dict[str, Any], named: str
) -> None:
    response = InferResponse({"y": np.ones(2, np.float32)}, parameters, model_name="m", model_version="1")
    with pytest.raises(HeadraceError) as refusal:
        encode(response, {}, default, {}, False)
    assert refusal.value.code is Code.INTERNAL
    assert refusal.value.message.startswith(f"response parameter {named} can not be sent: ")


def body_of(reply: HttpReply) -> bytes:
    return b"".join(bytes(part) for part in reply.parts)


@pytest.mark.parametrize(
    "parameters", [{}, {"target": "m:1", "by": 'a "rule"'}, {"a": 1, "b": "t"}, {"a": True}, {"a": 1.0}]
)
@pytest.mark.parametrize("id", ["", "00000017", 'a "quoted" \\ id', "ä ☃ \n", "x" * 300])
@pytest.mark.parametrize("shape", [(1, 16), (3, 2), (4,), ()])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_binary_answers_that_are_looked_up_are_those_that_are_printed(
    id: str, shape: tuple[int, ...], dtype: str, parameters: dict[str, Any]
) -> None:
    values = np.ones(shape, dtype)
    response = InferResponse({"y": values, "z": values}, parameters, "m", "1", id)
    formats = {"z": BINARY}
    # Compressed replies are printed each time.
    printed = zlib.decompress(body_of(encode(response, formats, BINARY, {}, False, b"gzip")), wbits=31)
    for _ in range(2):
        reply = encode(response, formats, BINARY, {}, False)
        assert body_of(reply) == printed
        (name, kind), (length_name, length) = reply.headers
        assert (name, kind) == (b"Content-Type", b"application/octet-stream")
        assert length_name == b"Inference-Header-Content-Length"
        document = json.loads(printed[: int(length)])
        assert document.get("id", "") == id
        assert [each["shape"] for each in document["outputs"]] == [list(shape)] * 2
        assert len(printed) - int(length) == 2 * values.nbytes


@pytest.mark.parametrize("outputs", [{}, {"y": np.ones((0, 2), np.float32)}])
def test_binary_answers_without_bytes_are_json(outputs: dict[str, Any]) -> None:
    reply = encode(InferResponse(outputs, {}, "m", "1"), {}, BINARY, {}, False)
    assert reply.headers == ((b"Content-Type", b"application/json"),)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("is_head", [False, True])
@pytest.mark.parametrize("size", [4, JOIN_BYTES])
def test_a_binary_answer_is_written_with_its_lengths(closes: bool, is_head: bool, size: int) -> None:
    reply = encode(InferResponse({"y": np.ones(size, np.uint8)}, {}, "m", "1"), {}, BINARY, {}, False)
    head, _, body = b"".join(bytes(part) for part in serialise(reply, closes, is_head)).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    length = dict(reply.headers)[b"Inference-Header-Content-Length"]
    assert lines == [
        b"HTTP/1.1 200 OK",
        b"Content-Type: application/octet-stream",
        b"Inference-Header-Content-Length: %b" % length,
        *([b"Connection: close"] if closes else []),
        b"Content-Length: %d" % (int(length) + size),
    ]
    assert body == (b"" if is_head else body_of(reply))
