"""``ModelInfer``: one request, one response (behaviours.md sections 2.3, 2.4 and 2.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.errors import Unavailable, Unsupported
from penstock.frontends.grpc.context import Context, Metadata
from penstock.frontends.grpc.decode import decode
from penstock.frontends.grpc.encode import encode
from penstock.frontends.grpc.wire import Parcel
from penstock.messages.single import AwaitedAnswer

if TYPE_CHECKING:
    from penstock.server import Server

#: The parameters that a call's metadata adds to its requests; raises `InvalidArgument`.
Forward: TypeAlias = Callable[[Metadata], Mapping[str, str]]

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


@dataclass(frozen=True, slots=True)
class Inference:
    """What the inference RPCs work with. ``forward`` is None when no metadata is forwarded."""

    server: Server
    forward: Forward | None = None

    def forwarded(self, context: Context) -> Mapping[str, str] | None:
        return None if self.forward is None else self.forward(context.metadata)


async def model_infer(inference: Inference, parcel: Parcel, context: Context) -> bytes:
    """The serialized ``ModelInferResponse``. Cancelling takes the request out of the queue."""
    if context.draining:
        raise Unavailable(SHUTTING_DOWN)
    server, message = inference.server, parcel.message
    model = server.resolve(message.model_name, message.model_version)
    if model.decoupled:
        raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
    answer = AwaitedAnswer()
    decoded = decode(parcel, answer, inference.forwarded(context))
    server.submit(decoded.request)
    return encode(await answer.to(decoded.request), model, decoded.classes)
