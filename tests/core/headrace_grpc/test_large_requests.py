"""Large messages are taken apart; the oracle is protobuf, which reads them whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from headrace.errors import InvalidArgument
from headrace.messages.request import Undecoded
from headrace.messages.tensor import BytesTensor
from headrace.off_loop import TooLargeForLoop
from headrace_grpc import wire
from headrace_grpc.decode import decode
from headrace_grpc.grpc_service_pb2 import ModelInferRequest, RepositoryModelLoadRequest
from headrace_grpc.large_requests import bounded_parser, unpack_large

COUNT = 30_000
CONTENTS: dict[str, tuple[str, Callable[[random.Random], Any]]] = {
    "bool_contents": ("BOOL", lambda choice: choice.random() < 0.5),
    "int_contents": ("INT16", lambda choice: choice.choice([0, 1, -1, 300, -(2**31), 2**31 - 1])),
    "int64_contents": ("INT64", lambda choice: choice.choice([0, 127, 128, -1, 2**62, -(2**63)])),
    "uint_contents": ("UINT8", lambda choice: choice.choice([0, 255, 256, 2**32 - 1])),
    "uint64_contents": ("UINT64", lambda choice: choice.choice([0, 2**64 - 1, 2**63])),
    "fp32_contents": ("FP32", lambda choice: choice.random()),
    "fp64_contents": ("FP64", lambda choice: choice.random()),
    "bytes_contents": ("BYTES", lambda choice: bytes(choice.choice([0, 1, 5, 200]))),
}


def request(name: str, count: int = COUNT) -> ModelInferRequest:
    datatype, value = CONTENTS[name]
    choice = random.Random(name)
    message = ModelInferRequest(model_name="m", id="1")
    message.inputs.add(name="first", datatype="FP32", shape=[1]).contents.fp32_contents.append(1.5)
    long = message.inputs.add(name="x", datatype=datatype, shape=[count])
    getattr(long.contents, name).extend([value(choice) for _ in range(count)])
    message.parameters["p"].string_param = "s" * 5000
    return message


def ignored(answer: object, final: bool) -> None:
    raise AssertionError


def wire_bytes(tensor: Any) -> bytes:
    return bytes(tensor.buffer) if isinstance(tensor, BytesTensor | Undecoded) else tensor.tobytes()


@pytest.mark.parametrize("name", CONTENTS)
def test_long_contents_are_read_as_protobuf_reads_them(name: str) -> None:
    message = request(name)
    body = message.SerializeToString()
    if len(body) > 1 << 16:
        with pytest.raises(TooLargeForLoop):
            wire.unpack(body)
    raw_request = unpack_large(body)
    assert not getattr(raw_request.message.inputs[1].contents, name)
    found = decode(raw_request).request
    whole = decode(wire.RawRequest(message, (), body)).request
    assert list(found.inputs) == ["first", "x"]
    assert wire_bytes(found.inputs["x"]) == wire_bytes(whole.inputs["x"])
    assert found.parameters == whole.parameters


def test_fields_that_are_not_packed_and_come_in_parts_are_one() -> None:
    body = request("int_contents").SerializeToString()
    more = ModelInferRequest.InferInputTensor(name="y", datatype="INT32", shape=[90_000])
    unpacked = b"".join(b"\x10" + bytes([number % 100]) for number in range(45_000))
    packed = ModelInferRequest.InferInputTensor(datatype="INT32")
    packed.contents.int_contents.extend([7] * 45_000)
    inner = more.SerializeToString() + b"\x2a" + wire.varint(len(unpacked)) + unpacked + packed.SerializeToString()
    body += b"\x2a" + wire.varint(len(inner)) + inner
    found = decode(unpack_large(body)).request.inputs["y"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == list(ModelInferRequest.FromString(body).inputs[2].contents.int_contents)


@pytest.mark.parametrize("name", CONTENTS)
def test_damage_is_refused_as_protobuf_refuses_it(name: str) -> None:
    body, choice = request(name, 9000).SerializeToString(), random.Random(1)
    for _ in range(12):
        damaged = bytearray(body)
        damaged[choice.randrange(len(body))] = choice.randrange(256)
        cut = bytes(damaged[: choice.choice([len(body), choice.randrange(len(body))])])
        try:
            whole = ModelInferRequest.FromString(cut)
        except DecodeError:
            with pytest.raises((DecodeError, InvalidArgument)):
                decode(unpack_large(cut))
            continue
        try:
            expected = decode(wire.RawRequest(whole, whole.raw_input_contents, cut)).request
        except InvalidArgument:
            continue
        found = decode(unpack_large(cut)).request
        assert {key: wire_bytes(value) for key, value in found.inputs.items()} == {
            key: wire_bytes(value) for key, value in expected.inputs.items()
        }


@pytest.mark.parametrize("field", [b"\x2a\0", b"\x32\0", b"\x22\0", b"\x3a\0", b"\x08\0"])
def test_a_message_made_of_parts_is_refused(field: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"more than (1048576 bytes besides|4096 raw)"):
        unpack_large(field * (1 << 20))


def test_other_messages_may_have_long_bytes_and_few_parts() -> None:
    parse = bounded_parser(RepositoryModelLoadRequest)
    message = RepositoryModelLoadRequest(model_name="m")
    message.parameters["file:1/x"].bytes_param = bytes(3 << 20)
    assert parse(message.SerializeToString()) == message
    with pytest.raises(InvalidArgument, match="more than 1048576 bytes besides"):
        parse(b"\x1a\0" * (1 << 20))
