"""``ModelInfer``: one request, one response (behaviours.md sections 2.3, 2.4 and 2.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from penstock.errors import InternalError, PenstockError, Unavailable, Unsupported
from penstock.frontends.failures import tell_fault
from penstock.frontends.grpc.context import Cancel, Context, Metadata, Reply
from penstock.frontends.grpc.encode import encode
from penstock.frontends.grpc.layouts import KnownLayouts
from penstock.frontends.grpc.wire import Parcel
from penstock.messages.response import InferResponse
from penstock.messages.single import SingleAnswer
from penstock.telemetry.pacing import paced

if TYPE_CHECKING:
    from penstock.models.served import ServedModel
    from penstock.server import Server

log = paced(__name__)

#: The parameters that a call's metadata adds to its requests; raises `InvalidArgument`.
Forward: TypeAlias = Callable[[Metadata], Mapping[str, str]]

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


@dataclass(frozen=True, slots=True)
class Inference:
    """What the inference RPCs work with. ``forward`` is None when no metadata is forwarded."""

    server: Server
    forward: Forward | None = None
    layouts: KnownLayouts = field(default_factory=KnownLayouts)

    def forwarded(self, context: Context) -> Mapping[str, str] | None:
        return None if self.forward is None else self.forward(context.metadata)


def model_infer(inference: Inference, parcel: Parcel, context: Context, reply: Reply) -> Cancel:
    """Answer ``parcel`` by a serialized ``ModelInferResponse``, by callback.

    What is returned cancels the request. Raises `PenstockError` if it is refused.
    """
    server, message = inference.server, parcel.message
    try:
        if context.draining:
            raise Unavailable(SHUTTING_DOWN)
        model = server.resolve(message.model_name, message.model_version)
        if model.decoupled:
            raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        answer = _Answer(model, reply)
        decoded = inference.layouts.decode(parcel, answer, inference.forwarded(context))
        answer.classes = decoded.classes
        server.submit(decoded.request)
    except PenstockError as error:
        tell_fault(error, "Infer", message.model_name, message.model_version)
        raise
    return decoded.request.cancel


class _Answer(SingleAnswer):
    """Replies to one request with what its model answers."""

    __slots__ = ("_model", "_reply", "classes")

    classes: Mapping[str, int]

    def __init__(self, model: ServedModel, reply: Reply) -> None:
        super().__init__()
        self._model, self._reply = model, reply

    def settle(self, answer: InferResponse | PenstockError) -> None:
        if isinstance(answer, PenstockError):
            tell_fault(answer, "Infer", self._model.name, str(self._model.version))
            self._reply(answer)
        else:
            self._reply(self._encode(answer))

    def _encode(self, response: InferResponse) -> bytes | PenstockError:
        try:
            return encode(response, self._model, self.classes)
        except PenstockError as error:
            return error
        except Exception:
            log.exception("the response of model '%s' could not be encoded", self._model.name)
            return InternalError("internal error; the server's log has the details")
