"""Reflection beside grpc's own servicer, on the same pool, and what tools make of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection as theirs
from grpc_reflection.v1alpha.reflection_pb2 import (
    ExtensionRequest,
    ServerReflectionRequest,
    ServerReflectionResponse,
)
from tritonclient.grpc import service_pb2 as triton

from headrace_grpc import reflection
from headrace_grpc.reflection import SERVICES, Reflection
from headrace_grpc.reflection_pb2 import ServerReflectionRequest as Received
from headrace_grpc.rpc import Context

NAMES = ("inference.GRPCInferenceService", "grpc.health.v1.Health", *SERVICES)
#: A second file, because the served one has no extensions.
EXTENDED = """
name: "extended.proto" package: "t" syntax: "proto2"
message_type { name: "M" extension_range { start: 100 end: 200 } }
extension { name: "late" extendee: ".t.M" number: 150 label: LABEL_OPTIONAL type: TYPE_INT32 }
extension { name: "early" extendee: ".t.M" number: 101 label: LABEL_OPTIONAL type: TYPE_INT32 }
"""


@pytest.fixture(params=["ours", "extended"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DescriptorPool:
    """Return the served descriptors, or messages with extensions."""
    found = reflection.pool()
    if request.param == "extended":
        from google.protobuf import text_format

        found = DescriptorPool()
        found.Add(text_format.Parse(EXTENDED, FileDescriptorProto()))
    monkeypatch.setattr(reflection, "pool", lambda: found)
    return found


def ask(*requests: ServerReflectionRequest) -> list[ServerReflectionResponse]:
    sent: list[ServerReflectionResponse] = []

    async def send(body: bytes) -> None:
        sent.append(ServerReflectionResponse.FromString(body))

    asyncio.run(Reflection(NAMES).serve(_stream(requests), send, cast("Context", None)))
    return sent


async def _stream(requests: tuple[ServerReflectionRequest, ...]) -> AsyncIterator[Received]:
    for request in requests:
        yield Received.FromString(request.SerializeToString())


Request = ServerReflectionRequest
REQUESTS = [
    Request(list_services="*"),
    Request(host="h", list_services=""),
    Request(file_by_filename="grpc_service.proto"),
    Request(file_by_filename="grpc/reflection/v1/reflection.proto"),
    Request(file_by_filename="extended.proto"),
    Request(file_by_filename="nowhere.proto"),
    Request(file_by_filename=""),
    Request(file_by_filename="a\0b"),
    *(Request(file_containing_symbol=name) for name in NAMES),
    Request(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
    Request(file_containing_symbol="inference.ModelInferRequest.InferInputTensor"),
    Request(file_containing_symbol="inference.ModelConfig.name"),
    Request(file_containing_symbol="inference.DataType"),
    Request(file_containing_symbol="headrace.ModelInferRequest"),
    Request(file_containing_symbol="t.M"),
    Request(file_containing_symbol=".t.M"),
    Request(file_containing_symbol="t.late"),
    Request(file_containing_symbol="\udfff".encode("utf-16", "surrogatepass").decode("utf-16", "replace")),
    *(Request(file_containing_extension=ExtensionRequest(containing_type=name, extension_number=number))
      for name in ("t.M", "inference.ModelConfig", "nothing", "") for number in (150, 101, 1, -1)),
    *(Request(all_extension_numbers_of_type=name) for name in ("t.M", "inference.ModelConfig", "nothing", "t.late")),
    Request(),
    Request(host="h"),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=[str(number) for number in range(len(REQUESTS))])
def test_the_answer_is_that_of_grpcs_own_servicer(pool: DescriptorPool, request_: ServerReflectionRequest) -> None:
    servicer: Any = theirs.ReflectionServicer(NAMES, pool)  # the stubs say that it returns nothing
    (expected,) = servicer.ServerReflectionInfo(iter([request_]), None)
    (answer,) = ask(request_)
    assert answer == expected


def test_every_request_is_answered_in_order_and_errors_end_nothing() -> None:
    names = [*NAMES, "nothing", *NAMES]
    answers = ask(*(Request(file_containing_symbol=name) for name in names))
    assert [answer.original_request.file_containing_symbol for answer in answers] == names
    kinds = [answer.WhichOneof("message_response") for answer in answers]
    assert kinds == ["file_descriptor_response"] * 4 + ["error_response"] + ["file_descriptor_response"] * 4


def test_the_files_make_tritons_messages() -> None:
    (answer,) = ask(Request(file_containing_symbol="inference.GRPCInferenceService"))
    described = DescriptorPool()
    for body in reversed(answer.file_descriptor_response.file_descriptor_proto):  # imported files are later
        described.AddSerializedFile(body)
    ours = described.FindServiceByName("inference.GRPCInferenceService")
    (service,) = triton.DESCRIPTOR.services_by_name.values()
    assert [(m.name, m.input_type.full_name, m.output_type.full_name) for m in ours.methods] == [
        (m.name, m.input_type.full_name, m.output_type.full_name) for m in service.methods
    ]
    request = described.FindMessageTypeByName("inference.ModelInferRequest")
    numbers = {field.name: field.number for field in request.fields}
    assert numbers == {field.name: field.number for field in triton.ModelInferRequest.DESCRIPTOR.fields}
