"""``POST .../infer``: decode, submit, encode, all by callback on the event loop.

The order of the steps, which decides which error is reported, is that of docs/spec/behaviours.md section 1.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.engine import Caller, admitted_caller, refuse_decoupled_http
from headrace.errors import HeadraceError, InvalidArgument, Unsupported
from headrace.messages.request import InferRequest, Undecoded
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Respond, Ticket
from headrace.off_loop import LARGE_BYTES, UNBOUNDED, OffLoopWork, TooLargeForLoop
from headrace_hosts.answering import ResponseWriter, check_strings
from headrace_hosts.held_memory import budget_of
from headrace_hosts.permitted import PermittedCaller, end, other_header
from headrace_hosts.recorded import LONGEST_TEXT, RECORDED, Recorded, principal_of
from headrace_http.admitted_requests import caller_of
from headrace_http.caller_limits import json_too_large
from headrace_http.documents import checked, parse
from headrace_http.infer_request import BodyLayoutCache, decode, decode_raw, header_length
from headrace_http.inputs import read_inputs
from headrace_http.large_documents import read_document, read_texts
from headrace_http.message import HEADER_LENGTH, Cancel, HttpReply, HttpRequest, Reply, error_reply
from headrace_http.outputs import JSON, LocatedOutput, OutputFormat, encode, print_values, response_encoding
from headrace_http.request_body import DECODABLE, decompress
from headrace_http.request_deadline import TIMEOUT, RequestDeadline, deadline_in
from headrace_http.url_paths import PathTarget

if TYPE_CHECKING:
    from headrace.engine import Engine, Meters, ModelView, Permits, Recorder
    from headrace.messages.tensor import Tensor

#: See `headrace_http.route_handlers.Handler`.
_Handler: TypeAlias = Callable[[HttpRequest, PathTarget, Reply], "Cancel | None"]

_NO_FORMATS: Mapping[str, OutputFormat] = {}
_NO_BYTES = memoryview(b"")
_ACCEPT = (b"Accept-Encoding", b"gzip, deflate")


class InferenceHandler:
    """The handler of infer requests. One per frontend."""

    def __init__(self, engine: Engine) -> None:
        self._submitter = engine.submitter(refuse_decoupled_http, admitted_caller)
        # Bound once, because every request needs them: `RequestSubmitter.find` and `RequestSubmitter.start`.
        self._find, self._start = self._submitter.find, self._submitter.start
        self._ticket: Callable[[InferRequest, Respond], Ticket] = Ticket
        self.resolve = engine.resolve
        self._max_bytes = engine.options.http_max_input_size
        self._large, self._take = engine.off_loop_work, budget_of(engine).take
        self._layouts = BodyLayoutCache()

    def __call__(self, http: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
        """Answer ``http`` through ``reply``, now or later. Raises `HeadraceError` if it is refused now.

        Returns a function that cancels the request.
        """
        view = self._find(target.name, target.version)
        headers = http.headers
        if b"content-encoding" in headers and headers[b"content-encoding"] not in DECODABLE:
            reply(_unsupported_encoding())
            return None
        deadline: RequestDeadline | None = None
        if TIMEOUT in headers:
            reply = deadline = RequestDeadline(headers[TIMEOUT], reply)
        accepted = headers.get(b"accept-encoding")
        answer = Answer(view, reply, response_encoding(accepted) if accepted else b"identity", self._large)
        try:
            request = self._read(http, target.name, target.version, answer, LARGE_BYTES)
        except TooLargeForLoop:
            cancel = self._begin(http, target, answer, getattr(reply, "caller", None), deadline)
            return cancel if deadline is None else deadline.begin(cancel)
        ticket = self._ticket(request, answer)
        if deadline is None:
            self._start(view, ticket, reply)
            return ticket.cancel
        request.expire_at(deadline.at_ns)
        self._start(view, ticket, reply)
        return deadline.begin(ticket.cancel)

    def without_admission(self) -> InferenceHandler:
        """Return a handler for requests that all interceptors leave out."""
        plain = copy(self)
        plain._submitter = submitter = self._submitter.without_admission()
        plain._find, plain._start = submitter.find, submitter.start
        return plain

    def recorded(
        self,
        transport: str,
        recorder: Recorder,
        otherwise: _Handler,
        permits: Permits | None = None,
        meters: Meters | None = None,
    ) -> _Handler:
        """Return a handler of requests whose records ``recorder`` gets, in place of admission.

        With ``permits`` or ``meters``, it does so for those that they let pass. ``otherwise`` answers all others, and
        rare ones: those that are compressed, have a deadline, are large, or are refused before they are submitted.
        """
        plain = self.without_admission()
        find, read, start = plain._find, plain._read, plain._start
        ticket_for, large, other = plain._ticket, plain._large, other_header(permits)

        def infer(http: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
            arrival_ns, headers = monotonic_ns(), http.headers
            if b"content-encoding" in headers or TIMEOUT in headers:
                return otherwise(http, target, reply)
            context, accepted, principal = headers.get(b"traceparent"), headers.get(b"accept-encoding"), ""
            meter, send = None, reply
            try:
                if permits is not None:
                    given = headers[b"authorization"] if b"authorization" in headers else _shown(headers, other, reply)
                    principal = permits[given][target.name]
                peer, certificate = reply.peer, reply.certificate  # type: ignore[attr-defined]
                view = find(target.name, target.version)
                if meters is not None:
                    if certificate is not None and permits is None:
                        return otherwise(http, target, reply)
                    found = meters[principal or (peer,), target.name]
                    if not found.begin(view, len(http.body)):
                        return otherwise(http, target, reply)
                    meter, send = found, partial(end, found, reply)
                answer = RecordedAnswer(
                    view, send, response_encoding(accepted) if accepted else b"identity", large, recorder
                )
                request = read(http, target.name, target.version, answer, LARGE_BYTES)
                size = 0
                for tensor in request.inputs.values():
                    size += tensor.nbytes  # type: ignore[union-attr]  # an `Undecoded` one has none
            except Exception:
                if meter is not None:
                    meter.take_back(len(http.body))
                return otherwise(http, target, reply)
            answer.origin = (
                arrival_ns,
                transport,
                peer,
                principal if certificate is None or principal else principal_of(certificate),
                "" if context is None else context[:LONGEST_TEXT].decode("latin-1"),
                target.name,
                view.version,
                request.id[:LONGEST_TEXT],
                size,
            )
            if permits is not None or meter is not None:
                request.send_as(PermittedCaller(partial(caller_of, http, reply, transport), principal, target.name))
            answer.ticket = ticket = ticket_for(request, answer)
            try:
                start(view, ticket)
            except Exception as error:
                answer.refuse(error)
            return ticket.cancel

        return infer

    def permitted(
        self, transport: str, otherwise: _Handler, permits: Permits | None, meters: Meters | None = None
    ) -> _Handler:
        """Return a handler of requests that ``permits`` lets pass, and ``meters``, if any. ``otherwise`` admits all
        others, and answers those that are compressed, have a deadline, are large, or are refused before they are
        submitted."""
        if meters is not None:
            return self._metered(transport, otherwise, permits, meters)
        assert permits is not None
        plain = self.without_admission()
        find, read, start = plain._find, plain._read, plain._start
        ticket_for, large, other = plain._ticket, plain._large, other_header(permits)

        def infer(http: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
            headers, name = http.headers, target.name
            try:
                given = headers[b"authorization"] if b"authorization" in headers else _shown(headers, other, reply)
                principal = permits[given][name]
                if b"content-encoding" in headers or TIMEOUT in headers:
                    return otherwise(http, target, reply)
                view, accepted = find(name, target.version), headers.get(b"accept-encoding")
                answer = Answer(view, reply, response_encoding(accepted) if accepted else b"identity", large)
                request = read(http, name, target.version, answer, LARGE_BYTES)
            except Exception:
                return otherwise(http, target, reply)
            request.send_as(PermittedCaller(partial(caller_of, http, reply, transport), principal, name))
            ticket = ticket_for(request, answer)
            start(view, ticket)
            return ticket.cancel

        return infer

    def _metered(self, transport: str, otherwise: _Handler, permits: Permits | None, meters: Meters) -> _Handler:
        plain = self.without_admission()
        find, read, start = plain._find, plain._read, plain._start
        ticket_for, large, other = plain._ticket, plain._large, other_header(permits)

        def infer(http: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
            headers, name, begun, principal = http.headers, target.name, None, ""
            tenant: str | tuple[str]
            try:
                if permits is not None:
                    given = headers[b"authorization"] if b"authorization" in headers else _shown(headers, other, reply)
                    tenant = principal = permits[given][name]
                elif reply.certificate is None:  # type: ignore[attr-defined]
                    tenant = (reply.peer,)  # type: ignore[attr-defined]
                else:
                    return otherwise(http, target, reply)
                if b"content-encoding" in headers or TIMEOUT in headers:
                    return otherwise(http, target, reply)
                view, accepted = find(name, target.version), headers.get(b"accept-encoding")
                meter = meters[tenant, name]
                if not meter.begin(view, len(http.body)):
                    return otherwise(http, target, reply)
                begun = meter
                encoding = response_encoding(accepted) if accepted else b"identity"
                answer = Answer(view, partial(end, meter, reply), encoding, large)
                request = read(http, name, target.version, answer, LARGE_BYTES)
            except Exception:
                if begun is not None:
                    begun.take_back(len(http.body))
                return otherwise(http, target, reply)
            request.send_as(PermittedCaller(partial(caller_of, http, reply, transport), principal, name))
            ticket = ticket_for(request, answer)
            try:
                start(view, ticket)
            except BaseException:
                meter.end()
                raise
            return ticket.cancel

        return infer

    async def read_request(
        self, http: HttpRequest, name: str, version: str
    ) -> tuple[InferRequest, Mapping[str, OutputFormat]]:
        """Return the inference in the body of ``http``, and its outputs that lie elsewhere. Raises `HeadraceError`."""
        headers = http.headers
        if b"content-encoding" in headers and headers[b"content-encoding"] not in DECODABLE:
            raise Unsupported("Unsupported compression type")
        deadline_ns = deadline_in(headers)
        answer = Answer(self.resolve(name, version), _nobody, b"identity", self._large)
        try:
            request = self._read(http, name, version, answer, LARGE_BYTES)
        except TooLargeForLoop:
            request = await self._large.run(partial(self._read_large, http, name, version, answer, None))
        if deadline_ns:
            request.expire_at(deadline_ns)
        located = {name: wanted for name, wanted in answer.formats.items() if isinstance(wanted, LocatedOutput)}
        return request, located

    async def print_response(self, response: InferResponse, located: Mapping[str, OutputFormat] = _NO_FORMATS) -> bytes:
        """Return ``response`` as a line of JSON, and write the outputs in ``located`` where they lie.

        Raises `HeadraceError`.
        """
        try:
            reply = encode(response, located, JSON, {}, False, loop_limit_bytes=LARGE_BYTES)
        except TooLargeForLoop:
            reply = await self._large.run(partial(encode, response, located, JSON, {}, False))
        return b"".join(reply.parts)

    async def read_document(self, http: HttpRequest, max_bytes: int | None = None, has_texts: bool = False) -> Any:
        """Return the JSON in the body of ``http``, which is not compressed, nested at most 100 levels.

        ``max_bytes`` are by default those of an infer request. ``has_texts``: it may have long strings. Raises
        `HeadraceError`.
        """
        body, most = http.body, self._max_bytes if max_bytes is None else max_bytes
        if body.nbytes > most:
            raise json_too_large(body.nbytes, most)
        if body.nbytes <= LARGE_BYTES:
            return checked(parse(body))
        return await self._large.run(lambda: read_texts(body) if has_texts else checked(read_document(body)))

    def hold(self, size_bytes: int) -> None:
        """Count ``size_bytes`` that a request takes besides its body. Raises `OutOfMemory` if that is too much."""
        self._large.count(size_bytes)

    def read_tensor(self, name: str, datatype: str, shape: Sequence[int], values: list[Any]) -> Tensor:
        """Return ``values`` from a JSON document as the input ``name``. Raises `InvalidArgument`."""
        entry = {"name": name, "datatype": datatype, "shape": list(shape), "data": values}
        tensor = read_inputs([entry], "", "", _NO_BYTES, 0, self._max_bytes, UNBOUNDED)[name]
        if isinstance(tensor, Undecoded):
            raise InvalidArgument(f"input '{name}' has {len(shape)} dims, more than are read from JSON")
        return tensor

    async def print_tensors(self, response: InferResponse) -> dict[str, bytes]:
        """Return each output of ``response`` as a JSON array. Raises `HeadraceError`."""
        try:
            return {name: print_values(tensor, LARGE_BYTES) for name, tensor in response.outputs.items()}
        except TooLargeForLoop:
            return await self._large.run(
                lambda: {name: print_values(tensor) for name, tensor in response.outputs.items()}
            )

    def _read(self, http: HttpRequest, name: str, version: str, answer: Answer, loop_limit_bytes: int) -> InferRequest:
        """Return the request, and set the formats of its ``answer``.

        Raises `HeadraceError`, and `TooLargeForLoop` beyond ``loop_limit_bytes``.
        """
        headers, body = http.headers, http.body
        if b"content-encoding" in headers and headers[b"content-encoding"] in (b"gzip", b"deflate"):
            body = decompress(body, self._max_bytes, loop_limit_bytes, self._take)
        length = headers.get(HEADER_LENGTH)
        if length is None:
            decoded = decode(name, version, body, body.nbytes, self._max_bytes, loop_limit_bytes)
        elif json_bytes := header_length(length, body.nbytes):
            known, request_id, rest = self._layouts.find(body, json_bytes)
            if known is not None:
                _, layout, answer.formats, answer.default = known
                return layout.request(name, version, request_id, body[json_bytes:])
            decoded = decode(name, version, body, json_bytes, self._max_bytes, loop_limit_bytes)
            if rest and loop_limit_bytes < UNBOUNDED:  # only the event loop uses the layouts
                self._layouts.keep(request_id, rest, decoded, body.nbytes - json_bytes)
        else:
            decoded = decode_raw(name, version, body, answer.view, self._max_bytes)
        request, answer.formats, answer.default = decoded
        return request

    def _begin(
        self,
        http: HttpRequest,
        target: PathTarget,
        answer: Answer,
        caller: Caller | None,
        deadline: RequestDeadline | None,
    ) -> Cancel:
        """Let a thread read a large request, then submit it."""
        read = partial(self._read_large, http, target.name, target.version, answer, deadline)
        return answer.read_large(read, self._submitter, caller)

    def _read_large(
        self, http: HttpRequest, name: str, version: str, answer: Answer, deadline: RequestDeadline | None
    ) -> InferRequest:
        """`_read` of a large request, on a thread."""
        request = self._read(http, name, version, answer, UNBOUNDED)
        check_strings(answer.view, request)
        if deadline is not None:
            request.expire_at(deadline.at_ns)
        return request


class Answer(ResponseWriter[HttpReply]):
    """Replies to one request with its model's response."""

    __slots__ = ("_encoding", "default", "formats")

    def __init__(self, view: ModelView, reply: Reply, encoding: bytes, large: OffLoopWork) -> None:
        self._answer, self._count = None, 0  # what the bases do, without their calls
        self.view, self._reply, self._large = view, reply, large
        self.formats, self.default, self._encoding = _NO_FORMATS, JSON, encoding

    def encode(self, response: InferResponse, loop_limit_bytes: int) -> HttpReply:
        view = self.view
        return encode(
            response, self.formats, self.default, view.labels, view.max_batch_size > 0, self._encoding, loop_limit_bytes
        )

    def refused(self, error: HeadraceError) -> HttpReply:
        return error_reply(error)


class RecordedAnswer(Recorded, Answer):
    """The same, with a record for a `Recorder`."""

    __slots__ = RECORDED

    def __init__(self, view: ModelView, reply: Reply, encoding: bytes, large: OffLoopWork, recorder: Recorder) -> None:
        self._answer, self._count = None, 0  # what the bases do, without their calls
        self.view, self.send, self._large, self.recorder = view, reply, large, recorder
        self.formats, self.default, self._encoding = _NO_FORMATS, JSON, encoding


def _shown(headers: Mapping[bytes, bytes], other: bytes, reply: Reply) -> tuple[bytes, bytes] | int:
    """Return what a caller without ``authorization`` has shown, as permits have it: ``other``, or his certificate."""
    return (other, headers[other]) if other in headers else id(reply.certificate)  # type: ignore[attr-defined]


def _nobody(reply: HttpReply) -> None:
    """Do nothing: another part answers this request."""


def _unsupported_encoding() -> HttpReply:
    return error_reply(Unsupported("Unsupported compression type")).with_header(*_ACCEPT)
