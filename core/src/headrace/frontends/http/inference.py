"""``POST .../infer``: decode, submit, encode, all by callback on the event loop.

The order of the steps decides which error wins; it is that of docs/spec/behaviours.md section 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, InternalError, Unsupported
from headrace.frontends.failures import tell_fault
from headrace.frontends.forwarding import HeaderForwarding
from headrace.frontends.http.compression import DECODABLE, decompress, response_encoding
from headrace.frontends.http.decode import decode, decode_raw, header_length
from headrace.frontends.http.encode import encode
from headrace.frontends.http.forms import BINARY, JSON, Form
from headrace.frontends.http.layouts import KnownLayouts
from headrace.frontends.http.message import HEADER_LENGTH, Cancel, HttpReply, HttpRequest, Reply, error_reply
from headrace.frontends.http.target import Target
from headrace.frontends.large import LARGE_BYTES, UNBOUNDED, Large, LargeWork, check_strings, worded
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.single import SingleAnswer
from headrace.telemetry.pacing import paced

if TYPE_CHECKING:
    from headrace.models.served import ServedModel
    from headrace.server import Server

log = paced(__name__)

_NO_FORMS: Mapping[str, Form] = {}
_ACCEPT = (b"Accept-Encoding", b"gzip, deflate")


class Inference:
    """The handler of infer requests. One per frontend."""

    def __init__(self, server: Server) -> None:
        self._resolve = server.resolve
        self._max_bytes = server.options.http_max_input_size
        self._large = server.large_work
        self._layouts = KnownLayouts()
        self._forwarding = HeaderForwarding(server.options.http_header_forward_pattern)

    def __call__(self, http: HttpRequest, target: Target, reply: Reply) -> Cancel | None:
        """Answer ``http`` through ``reply``, now or later; raises `HeadraceError` if refused now.

        What is returned cancels the request.
        """
        model = self._resolve(target.name, target.version)
        if model.decoupled:
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        headers = http.headers
        if b"content-encoding" in headers and headers[b"content-encoding"] not in DECODABLE:
            reply(_unsupported_encoding())
            return None
        accepted = headers.get(b"accept-encoding")
        answer = Answer(model, reply, response_encoding(accepted) if accepted else b"identity", self._large)
        request = InferRequest(target.name, {}, answer, (), "", target.version)
        try:
            self._read(http, model, request, answer, LARGE_BYTES)
        except Large:
            return self._begin(http, model, request, answer)
        if self._forwarding:
            self._forward(http, request)
        model.submit(request)
        return request.cancel

    def _read(
        self, http: HttpRequest, model: ServedModel, request: InferRequest, answer: Answer, patience: int
    ) -> None:
        """Fill ``request`` and the forms of its ``answer``. Raises `HeadraceError`, and `Large` beyond ``patience``."""
        headers, body = http.headers, http.body
        if b"content-encoding" in headers and headers[b"content-encoding"] in (b"gzip", b"deflate"):
            body = decompress(body, self._max_bytes, patience)
        length = headers.get(HEADER_LENGTH)
        json_bytes = body.nbytes if length is None else header_length(length, body.nbytes)
        if json_bytes or length is None:
            answer.forms, answer.default = self._decode(request, body, json_bytes, patience)
        else:
            decode_raw(request, body, model, self._max_bytes)
            answer.default = BINARY

    def _begin(self, http: HttpRequest, model: ServedModel, request: InferRequest, answer: Answer) -> Cancel:
        """Let a thread read what is large, and then submit it."""
        request.inputs.clear()

        def read() -> None:
            self._read(http, model, request, answer, UNBOUNDED)
            check_strings(model, request)

        def submit(outcome: Exception | None) -> None:
            if outcome is None:
                try:
                    # Another version may have taken its place meanwhile.
                    answer.model = current = self._resolve(request.model_name, request.model_version)
                    if self._forwarding:
                        self._forward(http, request)
                    current.submit(request)
                except HeadraceError as error:
                    answer.settle(error)
            else:
                answer.settle(worded(outcome))

        leave = self._large.begin(read, submit)

        def cancel() -> None:
            leave()
            request.cancel()

        return cancel

    def _decode(
        self, request: InferRequest, body: memoryview, json_bytes: int, patience: int
    ) -> tuple[Mapping[str, Form], Form]:
        layout = self._layouts.find(body, json_bytes)
        if layout is not None:
            layout.fill(request, body)
            return layout.forms, layout.default
        forms, default = decode(request, body, json_bytes, self._max_bytes, patience)
        if patience < UNBOUNDED:  # those are the event loop's
            self._layouts.keep(request, body, json_bytes, forms, default)
        return forms, default

    def _forward(self, http: HttpRequest, request: InferRequest) -> None:
        named = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in http.raw_headers)
        chosen = self._forwarding.parameters(named)
        if chosen:
            request.parameters = {**request.parameters, **chosen}


class Answer(SingleAnswer):
    """Replies to one request with what its model answers."""

    __slots__ = ("_encoding", "_large", "_reply", "default", "forms", "model")

    def __init__(self, model: ServedModel, reply: Reply, encoding: bytes, large: LargeWork) -> None:
        super().__init__()
        self.forms = _NO_FORMS
        self.default = JSON
        self.model = model
        self._reply = reply
        self._encoding = encoding
        self._large = large

    def settle(self, answer: InferResponse | HeadraceError) -> None:
        if isinstance(answer, HeadraceError):
            tell_fault(answer, "Infer", self.model.name, str(self.model.version))
            self._reply(error_reply(answer))
            return
        try:
            reply = self._encode(answer, LARGE_BYTES)
        except Large:
            self._begin(answer)
        else:
            self._reply(reply)

    def _begin(self, response: InferResponse) -> None:
        """Let a thread encode what is large."""

        def finish(outcome: HttpReply | Exception) -> None:
            self._reply(error_reply(worded(outcome)) if isinstance(outcome, Exception) else outcome)

        try:
            self._large.begin(partial(self._encode, response, UNBOUNDED), finish)
        except HeadraceError as error:  # too many wait
            finish(error)

    def _encode(self, response: InferResponse, patience: int) -> HttpReply:
        model = self.model
        try:
            return encode(
                response, self.forms, self.default, model.labels, model.max_batch_size > 0, self._encoding, patience
            )
        except HeadraceError as error:
            return error_reply(error)
        except Large:
            raise
        except Exception:
            log.exception("the response of model '%s' could not be encoded", model.name)
            return error_reply(InternalError(f"the response of model '{model.name}' could not be encoded"))


def _unsupported_encoding() -> HttpReply:
    plain = error_reply(Unsupported("Unsupported compression type"))
    return plain._replace(headers=(*plain.headers, _ACCEPT))
