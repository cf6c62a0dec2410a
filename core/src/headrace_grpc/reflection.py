"""Server reflection: tools such as grpcurl find ``inference.GRPCInferenceService``.

Our descriptors have packages of their own (see ``grpc_service.proto``). Here they are copied into a pool and renamed to
``inference`` and ``grpc.*``, so that tools show the usual names. Triton has no reflection, so no category of
restrictions covers it. It publishes only what the ``.proto`` files contain. Source:
https://github.com/grpc/grpc/blob/master/doc/server-reflection.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from functools import cached_property

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from headrace.config import model_config_pb2
from headrace_grpc.grpc_service_pb2 import DESCRIPTOR as GRPC_SERVICE
from headrace_grpc.health_pb2 import DESCRIPTOR as HEALTH
from headrace_grpc.reflection_pb2 import DESCRIPTOR as REFLECTION
from headrace_grpc.reflection_pb2 import (
    ErrorResponse,
    ExtensionNumberResponse,
    FileDescriptorResponse,
    ListServiceResponse,
    ServerReflectionRequest,
    ServerReflectionResponse,
    ServiceResponse,
)
from headrace_grpc.rpc import Context, Send

#: The second is the successor of the first, with the same messages. Tools ask for it first.
SERVICES = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")

#: Our descriptor of a standard service, its package, and the standard package and file.
STANDARD = (
    (HEALTH, "headrace.health", "grpc.health.v1", "grpc/health/v1/health.proto"),
    (REFLECTION, "headrace.reflection", "grpc.reflection.v1alpha", "grpc/reflection/v1alpha/reflection.proto"),
    (REFLECTION, "headrace.reflection", "grpc.reflection.v1", "grpc/reflection/v1/reflection.proto"),
)

#: Codes and texts of errors, as in grpc's own servicer.
_NOT_FOUND = ErrorResponse(error_code=5, error_message="not found")
_INVALID = ErrorResponse(error_code=3, error_message="invalid argument")


class Reflection:
    """Answers requests about ``services`` and the messages of `pool`."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = [ServiceResponse(name=name) for name in sorted(services)]

    async def serve(self, requests: AsyncIterator[ServerReflectionRequest], send: Send, context: Context) -> None:
        """Send one answer per request, in order. A request that fails does not end the stream."""
        async for request in requests:
            answer = self.answer(request)
            answer.original_request.CopyFrom(request)
            await send(answer.SerializeToString())

    def answer(self, request: ServerReflectionRequest) -> ServerReflectionResponse:
        kind = request.WhichOneof("message_request")
        if kind is None:
            return ServerReflectionResponse(error_response=_INVALID)
        if kind == "list_services":
            return ServerReflectionResponse(list_services_response=ListServiceResponse(service=self._services))
        try:
            if kind == "all_extension_numbers_of_type":
                return self._extension_numbers(request.all_extension_numbers_of_type)
            return _files(self._find(kind, request))
        except KeyError:
            return ServerReflectionResponse(error_response=_NOT_FOUND)

    @cached_property
    def _pool(self) -> DescriptorPool:
        return pool()

    def _find(self, kind: str, request: ServerReflectionRequest) -> FileDescriptor:
        if kind == "file_by_filename":
            return self._pool.FindFileByName(request.file_by_filename)
        if kind == "file_containing_symbol":
            return self._pool.FindFileContainingSymbol(request.file_containing_symbol)
        wanted = request.file_containing_extension
        extended = self._pool.FindMessageTypeByName(wanted.containing_type)
        extension = self._pool.FindExtensionByNumber(extended, wanted.extension_number)
        return self._pool.FindFileContainingSymbol(extension.full_name)

    def _extension_numbers(self, message: str) -> ServerReflectionResponse:
        extended = self._pool.FindMessageTypeByName(message)
        numbers = sorted(extension.number for extension in self._pool.FindAllExtensions(extended))
        found = ExtensionNumberResponse(base_type_name=extended.full_name, extension_number=numbers)
        return ServerReflectionResponse(all_extension_numbers_response=found)


def pool() -> DescriptorPool:
    """Return descriptors of everything that is served, in the standard packages."""
    result = DescriptorPool()
    for descriptor, package, name, file_name in STANDARD:
        standard = _renamed(descriptor, package, name)
        standard.name = file_name
        result.AddSerializedFile(standard.SerializeToString())
    for ours in (model_config_pb2.DESCRIPTOR, GRPC_SERVICE):
        result.AddSerializedFile(_renamed(ours, "headrace", "inference").SerializeToString())
    return result


def _files(file: FileDescriptor) -> ServerReflectionResponse:
    """Return ``file`` and all files that it imports, each once."""
    found: dict[str, bytes] = {}
    _collect(file, found)
    return ServerReflectionResponse(
        file_descriptor_response=FileDescriptorResponse(file_descriptor_proto=found.values())
    )


def _collect(file: FileDescriptor, found: dict[str, bytes]) -> None:
    found[file.name] = file.serialized_pb
    for imported in file.dependencies:
        if imported.name not in found:
            _collect(imported, found)


def _renamed(descriptor: FileDescriptor, package: str, name: str) -> FileDescriptorProto:
    """Return ``descriptor`` with ``name`` in place of its package ``package``."""
    file = FileDescriptorProto()
    descriptor.CopyToProto(file)
    file.package = name
    for message in file.message_type:
        _rename_fields(message, package, name)
    for service in file.service:
        for method in service.method:
            method.input_type = _rename(method.input_type, package, name)
            method.output_type = _rename(method.output_type, package, name)
    return file


def _rename_fields(message: DescriptorProto, package: str, name: str) -> None:
    for field in message.field:
        if field.type_name:  # an empty value would mark a number as a message
            field.type_name = _rename(field.type_name, package, name)
    for nested in message.nested_type:
        _rename_fields(nested, package, name)


def _rename(type_name: str, package: str, name: str) -> str:
    prefix = f".{package}."
    return f".{name}.{type_name.removeprefix(prefix)}" if type_name.startswith(prefix) else type_name
