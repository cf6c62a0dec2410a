"""Our messages against tritonclient's, in one process: same names, fields, numbers and types."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2 as v1alpha
from tritonclient.grpc import service_pb2 as theirs

from headrace_grpc import grpc_service_pb2 as ours
from headrace_grpc import reflection

#: The published messages of standard services.
PUBLISHED = {"grpc.health.v1": health_pb2, "grpc.reflection.v1alpha": v1alpha, "grpc.reflection.v1": v1alpha}


@pytest.mark.parametrize("standard", reflection.STANDARD, ids=list(PUBLISHED))
def test_the_standard_services_are_those_that_grpc_publishes(standard: tuple[FileDescriptor, str, str, str]) -> None:
    ours, package, name, file_name = standard
    assert ours.package == package
    served = file_of(reflection.pool().FindFileByName(file_name))
    assert served.package == name
    published = file_of(PUBLISHED[name].DESCRIPTOR)
    assert sorted(entry.name for entry in served.message_type) == sorted(e.name for e in published.message_type)
    for entry in published.message_type:
        assert message(served, entry.name) == message(published, entry.name)
    (one,), (other,) = served.service, published.service
    assert [(rpc.name, rpc.client_streaming, rpc.server_streaming) for rpc in one.method] == [
        (rpc.name, rpc.client_streaming, rpc.server_streaming) for rpc in other.method
    ]


def file_of(descriptor: object) -> FileDescriptorProto:
    file = FileDescriptorProto()
    descriptor.CopyToProto(file)  # type: ignore[attr-defined]
    return file


def message(file: FileDescriptorProto, name: str) -> DescriptorProto:
    """The message, with the package taken out of type names."""
    (found,) = (entry for entry in file.message_type if entry.name == name)
    copy = DescriptorProto()
    copy.CopyFrom(found)
    shorten(copy, file.package)
    return copy


def shorten(found: DescriptorProto, package: str) -> None:
    for field in found.field:
        if field.type_name:
            field.type_name = field.type_name.removeprefix(f".{package}.")
    for nested in found.nested_type:
        shorten(nested, package)
    found.nested_type.sort(key=lambda nested: nested.name)


OURS, THEIRS = file_of(ours.DESCRIPTOR), file_of(theirs.DESCRIPTOR)
NAMES = sorted(entry.name for entry in THEIRS.message_type)


def test_the_files_do_not_clash() -> None:
    assert OURS.package != THEIRS.package
    assert OURS.name != THEIRS.name


def test_there_are_the_same_messages() -> None:
    assert sorted(entry.name for entry in OURS.message_type) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_message_has_the_same_fields(name: str) -> None:
    assert message(OURS, name) == message(THEIRS, name)


def test_the_service_has_the_same_methods() -> None:
    def methods(file: FileDescriptorProto) -> list[tuple[str, str, str, bool, bool]]:
        (service,) = file.service
        return [
            (
                method.name,
                method.input_type.split(".")[-1],
                method.output_type.split(".")[-1],
                method.client_streaming,
                method.server_streaming,
            )
            for method in service.method
        ]

    assert methods(OURS) == methods(THEIRS)
    assert len(methods(OURS)) == 20


def test_reflection_shows_tritons_names() -> None:
    pool = reflection.pool()
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    assert [method.name for method in service.methods] == [method.name for method in THEIRS.service[0].method]
    infer = service.methods_by_name["ModelInfer"]
    assert infer.input_type.full_name == "inference.ModelInferRequest"
    config = pool.FindMessageTypeByName("inference.ModelConfigResponse").fields_by_name["config"].message_type
    assert config is not None
    assert config.full_name == "inference.ModelConfig"
    with pytest.raises(KeyError):
        pool.FindServiceByName("headrace.GRPCInferenceService")
