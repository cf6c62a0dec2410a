"""``ModelInfer``: one request, one response (behaviours.md sections 2.3, 2.4 and 2.6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.errors import InternalError, PenstockError, Unavailable, Unsupported
from penstock.frontends.grpc.context import Context, Metadata
from penstock.frontends.grpc.decode import decode
from penstock.frontends.grpc.encode import encode
from penstock.frontends.grpc.wire import Parcel
from penstock.messages.response import Answer, InferResponse

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
    reply = _Reply()
    decoded = decode(parcel, reply.respond, inference.forwarded(context))
    server.submit(decoded.request)
    try:
        answer = await reply.future
    except asyncio.CancelledError:
        decoded.request.cancel()
        raise
    if isinstance(answer, PenstockError):
        raise answer
    return encode(answer, model, decoded.classes)


class _Reply:
    """Waits for the one answer of a request."""

    __slots__ = ("_answer", "_count", "future")

    def __init__(self) -> None:
        # An error is a result, too: as an exception it would be logged when the caller has gone.
        self.future: asyncio.Future[InferResponse | PenstockError] = asyncio.get_running_loop().create_future()
        self._answer: Answer = None
        self._count = 0

    def respond(self, answer: Answer, final: bool) -> None:
        if answer is not None:
            self._answer = answer
            self._count += 1
        if not final or self.future.done():  # done: the caller has gone
            return
        if self._answer is None or self._count != 1:
            self._answer = InternalError(f"expected a single response, got {self._count}")
        self.future.set_result(self._answer)
