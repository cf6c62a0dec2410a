"""``ModelInfer``: one request, one response (docs/spec/behaviours.md sections 2.3, 2.4 and 2.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from google.protobuf.message import DecodeError

from headrace.errors import CallerError, Code, HeadraceError, InternalError, Unavailable, Unsupported
from headrace.frontends.failures import tell_fault
from headrace.frontends.grpc.context import Cancel, Context, Metadata, Reply
from headrace.frontends.grpc.decode import Decoded, decode
from headrace.frontends.grpc.encode import encode
from headrace.frontends.grpc.layouts import KnownLayouts
from headrace.frontends.grpc.wire import Parcel
from headrace.frontends.large import LARGE_BYTES, Large, LargeWork, check_strings, worded
from headrace.messages.request import InferRequest, Respond
from headrace.messages.response import InferResponse
from headrace.messages.single import SingleAnswer
from headrace.telemetry.pacing import paced

if TYPE_CHECKING:
    from headrace.models.served import ServedModel
    from headrace.server import Server

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

    What is returned cancels the request. Raises `HeadraceError` if it is refused.
    """
    server, message = inference.server, parcel.message
    try:
        if context.draining:
            raise Unavailable(SHUTTING_DOWN)
        model = server.resolve(message.model_name, message.model_version)
        if model.decoupled:
            raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        answer = _Answer(model, reply, server.large_work)
        try:
            decoded = inference.layouts.decode(parcel, answer, inference.forwarded(context))
        except Large:
            return _infer_large(inference, parcel, inference.forwarded(context), answer)
        answer.classes = decoded.classes
        server.submit(decoded.request)
    except HeadraceError as error:
        tell_fault(error, "Infer", message.model_name, message.model_version)
        raise
    return decoded.request.cancel


def decode_large(model: ServedModel, parcel: Parcel, respond: Respond, forwarded: Mapping[str, str] | None) -> Decoded:
    """What ``parcel`` asks of ``model``, where that is a matter of millions of elements. On a thread."""
    decoded = decode(parcel, respond, forwarded)
    check_strings(model, decoded.request)
    return decoded


def _infer_large(inference: Inference, parcel: Parcel, forwarded: Mapping[str, str] | None, answer: _Answer) -> Cancel:
    """Let a thread decode what is large, and then submit it."""
    submitted: list[InferRequest] = []

    def submit(outcome: Decoded | Exception) -> None:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            request = outcome.request
            # Another version may have taken its place meanwhile.
            answer.model = inference.server.resolve(request.model_name, request.model_version)
            answer.classes = outcome.classes
            answer.model.submit(request)
            submitted.append(request)
        except DecodeError:
            answer.settle(CallerError("Unable to parse request", Code.INTERNAL))
        except Exception as error:
            answer.settle(worded(error))
        finally:
            del outcome  # an error and the frame that has it would keep each other, and the message, for the collector

    leave = inference.server.large_work.begin(partial(decode_large, answer.model, parcel, answer, forwarded), submit)

    def cancel() -> None:
        leave()
        for request in submitted:
            request.cancel()

    return cancel


class _Answer(SingleAnswer):
    """Replies to one request with what its model answers."""

    __slots__ = ("_large", "_reply", "classes", "model")

    classes: Mapping[str, int]

    def __init__(self, model: ServedModel, reply: Reply, large: LargeWork) -> None:
        super().__init__()
        self.model, self._reply, self._large = model, reply, large

    def settle(self, answer: InferResponse | HeadraceError) -> None:
        if isinstance(answer, HeadraceError):
            tell_fault(answer, "Infer", self.model.name, str(self.model.version))
            self._reply(answer)
            return
        try:
            encoded = self._encode(answer, LARGE_BYTES)
        except Large:
            self._begin(answer)
        else:
            self._reply(encoded)

    def _begin(self, response: InferResponse) -> None:
        """Let a thread encode what is large."""

        def finish(outcome: bytes | Exception) -> None:
            self._reply(worded(outcome) if isinstance(outcome, Exception) else outcome)

        try:
            self._large.begin(partial(encode, response, self.model, self.classes), finish)
        except HeadraceError as error:  # too many wait
            self._reply(error)

    def _encode(self, response: InferResponse, patience: int) -> bytes | HeadraceError:
        try:
            return encode(response, self.model, self.classes, None, patience)
        except HeadraceError as error:
            return error
        except Large:
            raise
        except Exception:
            log.exception("the response of model '%s' could not be encoded", self.model.name)
            return InternalError("internal error; the server's log has the details")
