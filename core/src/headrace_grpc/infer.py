"""``ModelInfer``: one request, one response (docs/spec/behaviours.md sections 2.3, 2.4 and 2.6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from copy import copy
from functools import cached_property, partial
from time import monotonic_ns
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from headrace.engine import Caller, admitted_caller, refuse_decoupled_model_infer
from headrace.errors import CallerError, Code, HeadraceError, Unavailable
from headrace.frontends.failures import log_fault
from headrace.messages.request import InferRequest, log_id
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Respond, Ticket, ticket_of
from headrace.off_loop import OffLoopWork, TooLargeForLoop
from headrace_grpc import usual_messages
from headrace_grpc.decode import Change, Decoded, decode
from headrace_grpc.encode import encode
from headrace_grpc.located_messages import LocatedMessages
from headrace_grpc.rpc import Cancel, Context, Direct, Reply, caller_of, first
from headrace_grpc.usual_messages import ReadMessage, unpack
from headrace_grpc.wire import Buffer, RawRequest
from headrace_hosts.answering import ResponseWriter, check_strings
from headrace_hosts.held_memory import HeldMemory, budget_of
from headrace_hosts.permitted import PermittedCaller, end, other_header
from headrace_hosts.recorded import LONGEST_TEXT, RECORDED, Recorded, principal_of
from headrace_locations.tensor_locations import TensorLocations

if TYPE_CHECKING:
    from headrace.engine import Engine, Meters, ModelView, Permits, Recorder

AUTHORIZATION = b"authorization"
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
#: What a call is told that the server has no more time for.
OUT_OF_TIME = "The server has stopped before the call was answered: its exit timeout is over."


class Inference:
    """The objects that the inference RPCs share."""

    def __init__(self, engine: Engine) -> None:
        self.off_loop_work, self.options, self.admission = engine.off_loop_work, engine.options, engine.admission
        self.streams, self._engine = engine.streams, engine
        #: The tasks that read streams. The event loop itself keeps no reference to tasks.
        self.readers: set[asyncio.Task[None]] = set()
        locations = TensorLocations.of(engine)
        #: Decode a message on the event loop, and one that raised `TooLargeForLoop` on a thread.
        self.decode: Callable[[ReadMessage], Decoded] = usual_messages.decode
        self.decode_large: Callable[[RawRequest], Decoded] = decode
        self.ticket: Callable[[InferRequest, Respond], Ticket] = Ticket
        if locations is not None:
            located = LocatedMessages(locations, engine.resolve)
            self.decode, self.decode_large, self.ticket = located.decode, located.decode_large, ticket_of
        #: For one response, and for any number.
        self.single, self.any_number = (
            engine.submitter(refuse_decoupled_model_infer, admitted_caller),
            engine.submitter(None, admitted_caller),
        )

    @cached_property
    def budget(self) -> HeldMemory:
        """The memory budget of the server."""
        return budget_of(self._engine)

    def without_admission(self) -> Inference:
        """Return the objects for requests that all interceptors leave out."""
        plain = copy(self)
        plain.single = self.single.without_admission()
        return plain


def model_infer(inference: Inference, raw_request: ReadMessage, context: Context, reply: Reply) -> Cancel:
    """Answer ``raw_request`` by a serialized ``ModelInferResponse``, by callback. Return a function that cancels it.

    Raises `HeadraceError` if it is refused.
    """
    message = raw_request.message
    try:
        if context.draining:
            raise Unavailable(SHUTTING_DOWN)
        view = inference.single.find(message.model_name, message.model_version)
        answer = _Answer(view, reply, inference.off_loop_work)
        try:
            decoded = inference.decode(raw_request)
        except TooLargeForLoop:
            return _infer_large(inference, raw_request, answer, getattr(context, "caller", None), context.deadline_ns)
        answer.classes = decoded.classes
        if deadline_ns := context.deadline_ns:
            decoded.request.expire_at(deadline_ns)
        ticket = inference.ticket(decoded.request, answer)
        inference.single.start(view, ticket, context)
    except HeadraceError as error:
        log_fault(error, "Infer", message.model_name, message.model_version)
        raise
    return ticket.cancel


def recorded_infer(
    inference: Inference,
    recorder: Recorder,
    otherwise: Direct,
    permits: Permits | None = None,
    meters: Meters | None = None,
) -> Direct:
    """Return `model_infer` for requests whose records ``recorder`` gets, in place of admission.

    With ``permits`` or ``meters``, it does so for those that they let pass. It takes the message as received.
    ``otherwise`` answers all others, and rare ones: those that are large, or refused before they are submitted.
    ``inference`` has no admission.
    """
    find, start = inference.single.find, inference.single.start
    decode, ticket_for, large = inference.decode, inference.ticket, inference.off_loop_work
    other = other_header(permits)

    def infer(body: Buffer, context: Context, reply: Reply) -> Cancel | None:
        arrival_ns, principal, certificate = monotonic_ns(), "", context.certificate
        meter, send = None, reply
        try:
            permit = None if permits is None else permits[_credential(context, other)]
            raw_request = unpack(body)
            message = raw_request.message
            if permit is not None:
                principal = permit[message.model_name]
            if context.draining:
                return otherwise(body, context, reply)
            view = find(message.model_name, message.model_version)
            if meters is not None:
                if certificate is not None and permits is None:
                    return otherwise(body, context, reply)
                found = meters[principal or (context.peer,), message.model_name]
                if not found.begin(view, len(body)):
                    return otherwise(body, context, reply)
                meter, send = found, partial(end, found, reply)
            decoded = decode(raw_request)
            request, size = decoded.request, 0
            for tensor in request.inputs.values():
                size += tensor.nbytes  # type: ignore[union-attr]  # an `Undecoded` one has none
        except Exception:
            if meter is not None:
                meter.take_back(len(body))
            return otherwise(body, context, reply)
        answer = _RecordedAnswer(view, send, large, recorder, decoded.classes)
        answer.origin = (
            arrival_ns,
            "grpc",
            context.peer,
            principal if certificate is None or principal else principal_of(certificate),
            (first(context.metadata, "traceparent") or "")[:LONGEST_TEXT],
            message.model_name,
            view.version,
            message.id[:LONGEST_TEXT],
            size,
        )
        if deadline_ns := context.deadline_ns:
            request.expire_at(deadline_ns)
        if permits is not None or meter is not None:
            request.send_as(PermittedCaller(partial(caller_of, context), principal, message.model_name))
        answer.ticket = ticket = ticket_for(request, answer)
        try:
            start(view, ticket)
        except Exception as error:
            answer.refuse(error)
        return ticket.cancel

    return infer


def _credential(context: Context, other: bytes) -> str | tuple[bytes, str] | int:
    """Return what the caller has shown, as permits have it: ``authorization``, else ``other``, else his certificate."""
    given = context.only(AUTHORIZATION)
    if given is not None:
        return given
    if other and (given := context.only(other)) is not None:
        return other, given
    return id(context.certificate)


def permitted_infer(
    inference: Inference, otherwise: Direct, permits: Permits | None, meters: Meters | None = None
) -> Direct:
    """Return `model_infer` for requests that ``permits`` lets pass, and ``meters``, if any. It takes the message as
    received.

    ``otherwise`` admits all others, and answers those that are large, or refused before they are submitted.
    ``inference`` has no admission.
    """
    if meters is not None:
        return _metered_infer(inference, otherwise, permits, meters)
    assert permits is not None
    find, start = inference.single.find, inference.single.start
    decode, ticket_for, large = inference.decode, inference.ticket, inference.off_loop_work
    other = other_header(permits)

    def infer(body: Buffer, context: Context, reply: Reply) -> Cancel | None:
        try:
            permit = permits[context.only(AUTHORIZATION) or _credential(context, other)]
            raw_request = unpack(body)
            message = raw_request.message
            name = message.model_name
            principal = permit[name]
            if context.draining:
                return otherwise(body, context, reply)
            view = find(name, message.model_version)
            decoded = decode(raw_request)
        except Exception:
            return otherwise(body, context, reply)
        answer, request = _Answer(view, reply, large), decoded.request
        answer.classes = decoded.classes
        if deadline_ns := context.deadline_ns:
            request.expire_at(deadline_ns)
        request.send_as(PermittedCaller(partial(caller_of, context), principal, name))
        ticket = ticket_for(request, answer)
        start(view, ticket)
        return ticket.cancel

    return infer


def _metered_infer(inference: Inference, otherwise: Direct, permits: Permits | None, meters: Meters) -> Direct:
    find, start = inference.single.find, inference.single.start
    decode, ticket_for, large = inference.decode, inference.ticket, inference.off_loop_work
    other = other_header(permits)

    def infer(body: Buffer, context: Context, reply: Reply) -> Cancel | None:
        begun, principal = None, ""
        tenant: str | tuple[str]
        try:
            permit = None if permits is None else permits[_credential(context, other)]
            raw_request = unpack(body)
            message = raw_request.message
            name = message.model_name
            if permit is not None:
                tenant = principal = permit[name]
            elif context.certificate is None:
                tenant = (context.peer,)
            else:
                return otherwise(body, context, reply)
            if context.draining:
                return otherwise(body, context, reply)
            view, meter = find(name, message.model_version), meters[tenant, name]
            if not meter.begin(view, len(body)):
                return otherwise(body, context, reply)
            begun = meter
            decoded = decode(raw_request)
        except Exception:
            if begun is not None:
                begun.take_back(len(body))
            return otherwise(body, context, reply)
        answer, request = _Answer(view, partial(end, meter, reply), large), decoded.request
        answer.classes = decoded.classes
        if deadline_ns := context.deadline_ns:
            request.expire_at(deadline_ns)
        request.send_as(PermittedCaller(partial(caller_of, context), principal, name))
        ticket = ticket_for(request, answer)
        try:
            start(view, ticket)
        except BaseException:
            meter.end()
            raise
        return ticket.cancel

    return infer


def decode_large(inference: Inference, view: ModelView, raw_request: ReadMessage) -> Decoded:
    """Return the decoded ``raw_request``, which may have millions of elements. Runs on a thread."""
    assert isinstance(raw_request, RawRequest)  # a `UsualMessage` is never that large
    try:
        decoded = inference.decode_large(raw_request)
    except DecodeError:
        raise CallerError("Unable to parse request", Code.INTERNAL) from None
    check_strings(view, decoded.request)
    return decoded


def _infer_large(
    inference: Inference,
    raw_request: ReadMessage,
    answer: _Answer,
    caller: Caller | None,
    deadline_ns: int,
) -> Cancel:
    """Let a thread decode a large request, then submit it."""

    def read() -> InferRequest:
        decoded = decode_large(inference, answer.view, raw_request)
        answer.classes = decoded.classes
        if deadline_ns:
            decoded.request.expire_at(deadline_ns)
        return decoded.request

    return answer.read_large(read, inference.single, caller, log_id(raw_request.message.id))


class _Answer(ResponseWriter["bytes | HeadraceError"]):
    """Replies to one request with its model's response."""

    __slots__ = ("classes",)

    classes: Mapping[str, Change]

    def encode(self, response: InferResponse, loop_limit_bytes: int) -> bytes:
        return encode(response, self.view, self.classes, None, loop_limit_bytes)

    def refused(self, error: HeadraceError) -> HeadraceError:
        return error


class _RecordedAnswer(Recorded, _Answer):
    """The same, with a record for a `Recorder`."""

    __slots__ = RECORDED

    def __init__(
        self,
        view: ModelView,
        reply: Reply,
        large: OffLoopWork,
        recorder: Recorder,
        classes: Mapping[str, Change],
    ) -> None:
        self._answer, self._count = None, 0  # what the bases do, without their calls
        self.view, self.send, self._large, self.recorder, self.classes = view, reply, large, recorder, classes
