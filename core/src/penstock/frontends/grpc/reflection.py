"""Server reflection: tools such as grpcurl see ``inference.GRPCInferenceService``.

Our descriptors carry our own package (see ``grpc_service.proto``). Here they are copied into a pool
of their own and renamed to package ``inference``, so that tools show the names that users know.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.config import model_config_pb2
from penstock.frontends.grpc import grpc_service_pb2
from penstock.frontends.grpc.rpcs import HEALTH_SERVICE, SERVICE

#: The successor of ``v1alpha``, with the same messages; tools ask for it first.
_V1_SERVICE = "grpc.reflection.v1.ServerReflection"
_OURS, _THEIRS = "penstock", "inference"


def handlers() -> list[grpc.GenericRpcHandler[Any, Any]]:
    """Handlers of both versions of the reflection service."""
    names = (SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names, pool())  # type: ignore[attr-defined]  # the stubs lack it
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return [
        grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": method})
        for service in (reflection.SERVICE_NAME, _V1_SERVICE)
    ]


def pool() -> DescriptorPool:
    """Descriptors of everything served, in Triton's package."""
    result = DescriptorPool()
    for module in (health_pb2, reflection_pb2):
        result.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    for ours in (model_config_pb2, grpc_service_pb2):
        result.AddSerializedFile(_renamed(ours.DESCRIPTOR).SerializeToString())
    return result


def _renamed(descriptor: FileDescriptor) -> FileDescriptorProto:
    file = FileDescriptorProto()
    descriptor.CopyToProto(file)
    file.package = _THEIRS
    for message in file.message_type:
        _rename_fields(message)
    for service in file.service:
        for method in service.method:
            method.input_type = _rename(method.input_type)
            method.output_type = _rename(method.output_type)
    return file


def _rename_fields(message: DescriptorProto) -> None:
    for field in message.field:
        if field.type_name:  # setting it to empty would mark a number as a message
            field.type_name = _rename(field.type_name)
    for nested in message.nested_type:
        _rename_fields(nested)


def _rename(name: str) -> str:
    prefix = f".{_OURS}."
    return f".{_THEIRS}.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
