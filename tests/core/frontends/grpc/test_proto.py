"""Our messages against tritonclient's, in one process: same names, fields, numbers and types."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from tritonclient.grpc import service_pb2 as theirs

from headrace.frontends.grpc import grpc_service_pb2 as ours
from headrace.frontends.grpc import reflection


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
