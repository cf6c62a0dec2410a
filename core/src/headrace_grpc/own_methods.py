"""The declarations of Headrace's own gRPC methods: by a handler that gets the engine, or by a function that makes the
RPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar

from google.protobuf.message import Message

from headrace.engine import Operation
from headrace.off_loop import LARGE_BYTES, TooLargeForLoop
from headrace_grpc.large_requests import bounded_parser
from headrace_grpc.plugin_methods import GrpcMethod, MethodServices, read_name
from headrace_grpc.rpc import Answer, Rpc
from headrace_grpc.wire import Buffer

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"

#: The operations whose messages call the model's field ``name``.
_ASKED_BY_NAME = (Operation.MODEL_READY, Operation.MODEL_METADATA, Operation.MODEL_CONFIG, Operation.STATISTICS)


class OwnMethod(GrpcMethod):
    """A method whose `Rpc` is made from the shared services."""

    make: ClassVar[Callable[[OwnMethod, MethodServices], Rpc]]

    def rpc(self, services: MethodServices) -> Rpc:
        return type(self).make(self, services)


def own_method(
    name: str, operation: Operation, make: Callable[[OwnMethod, MethodServices], Rpc], service: str = SERVICE
) -> type[OwnMethod]:
    """Return the method ``name``. ``make`` returns its `Rpc`."""
    return type(name, (OwnMethod,), {"name": f"/{service}/{name}", "operation": operation, "make": make})


def message_method(
    name: str,
    operation: Operation,
    request: type[Message],
    handler: Callable[..., Awaitable[Answer]],
    service: str = SERVICE,
) -> type[OwnMethod]:
    """Return the method ``name``, whose ``handler`` takes the engine, the message and the context."""

    def make(method: OwnMethod, services: MethodServices) -> Rpc:
        unary = partial(handler, method.engine)
        return Rpc(*read_name(type(method)), operation, unary=unary, **message(operation, request))

    return own_method(name, operation, make, service)


def message(operation: Operation, request: type[Message]) -> dict[str, Any]:
    """Return how an `Rpc` reads a ``request``: parsed directly, or scanned first if it is large."""

    def parse(body: Buffer) -> Message:
        if len(body) > LARGE_BYTES:
            raise TooLargeForLoop
        return request.FromString(body)  # type: ignore[arg-type]  # a memoryview is taken, too

    return {"parse": parse, "parse_large": bounded_parser(request), "model_field": model_field(operation, request)}


def model_field(operation: Operation, request: type[Message]) -> tuple[int, str] | None:
    """Return the field of ``request`` that names a model; None if there is none."""
    fields = request.DESCRIPTOR.fields_by_name
    field = fields.get("model_name") or (fields.get("name") if operation in _ASKED_BY_NAME else None)
    return None if field is None else (field.number, field.name)
