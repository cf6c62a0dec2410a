"""``POST .../infer``: decode, submit, encode, all by callback on the event loop.

The order of the steps decides which error wins; it is that of behaviours.md section 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.errors import InternalError, PenstockError, Unsupported
from penstock.frontends.failures import tell_fault
from penstock.frontends.forwarding import HeaderForwarding
from penstock.frontends.http.compression import DECODABLE, decompress, response_encoding
from penstock.frontends.http.decode import decode, decode_raw, header_length
from penstock.frontends.http.encode import encode
from penstock.frontends.http.forms import BINARY, JSON, Form
from penstock.frontends.http.layouts import KnownLayouts
from penstock.frontends.http.message import HEADER_LENGTH, Cancel, HttpReply, HttpRequest, Reply, error_reply
from penstock.frontends.http.target import Target
from penstock.messages.request import InferRequest
from penstock.messages.response import InferResponse
from penstock.messages.single import SingleAnswer
from penstock.telemetry.pacing import paced

if TYPE_CHECKING:
    from penstock.models.served import ServedModel
    from penstock.server import Server

log = paced(__name__)

_NO_FORMS: Mapping[str, Form] = {}
_ACCEPT = (b"Accept-Encoding", b"gzip, deflate")


class Inference:
    """The handler of infer requests. One per frontend."""

    def __init__(self, server: Server) -> None:
        self._resolve = server.resolve
        self._max_bytes = server.options.http_max_input_size
        self._layouts = KnownLayouts()
        self._forwarding = HeaderForwarding(server.options.http_header_forward_pattern)

    def __call__(self, http: HttpRequest, target: Target, reply: Reply) -> Cancel | None:
        """Answer ``http`` through ``reply``, now or later; raises `PenstockError` if refused now.

        What is returned cancels the request.
        """
        model = self._resolve(target.name, target.version)
        if model.decoupled:
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        headers, body = http.headers, http.body
        if b"content-encoding" in headers:
            encoding = headers[b"content-encoding"]
            if encoding not in DECODABLE:
                reply(_unsupported_encoding())
                return None
            if encoding in (b"gzip", b"deflate"):
                body = decompress(body, self._max_bytes)
        accepted = headers.get(b"accept-encoding")
        answer = Answer(model, reply, response_encoding(accepted) if accepted else b"identity")
        request = InferRequest(target.name, {}, answer, (), "", target.version)
        length = headers.get(HEADER_LENGTH)
        json_bytes = body.nbytes if length is None else header_length(length, body.nbytes)
        if json_bytes or length is None:
            answer.forms, answer.default = self._decode(request, body, json_bytes)
        else:
            decode_raw(request, body, model, self._max_bytes)
            answer.default = BINARY
        if self._forwarding:
            self._forward(http, request)
        model.submit(request)
        return request.cancel

    def _decode(self, request: InferRequest, body: memoryview, json_bytes: int) -> tuple[Mapping[str, Form], Form]:
        layout = self._layouts.find(body, json_bytes)
        if layout is not None:
            layout.fill(request, body)
            return layout.forms, layout.default
        forms, default = decode(request, body, json_bytes, self._max_bytes)
        self._layouts.keep(request, body, json_bytes, forms, default)
        return forms, default

    def _forward(self, http: HttpRequest, request: InferRequest) -> None:
        named = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in http.raw_headers)
        chosen = self._forwarding.parameters(named)
        if chosen:
            request.parameters = {**request.parameters, **chosen}


class Answer(SingleAnswer):
    """Replies to one request with what its model answers."""

    __slots__ = ("_encoding", "_model", "_reply", "default", "forms")

    def __init__(self, model: ServedModel, reply: Reply, encoding: bytes) -> None:
        super().__init__()
        self.forms = _NO_FORMS
        self.default = JSON
        self._model = model
        self._reply = reply
        self._encoding = encoding

    def settle(self, answer: InferResponse | PenstockError) -> None:
        if isinstance(answer, PenstockError):
            tell_fault(answer, "Infer", self._model.name, str(self._model.version))
            self._reply(error_reply(answer))
        else:
            self._reply(self._encode(answer))

    def _encode(self, response: InferResponse) -> HttpReply:
        model = self._model
        try:
            return encode(response, self.forms, self.default, model.labels, model.max_batch_size > 0, self._encoding)
        except PenstockError as error:
            return error_reply(error)
        except Exception:
            log.exception("the response of model '%s' could not be encoded", model.name)
            return error_reply(InternalError(f"the response of model '{model.name}' could not be encoded"))


def _unsupported_encoding() -> HttpReply:
    plain = error_reply(Unsupported("Unsupported compression type"))
    return plain._replace(headers=(*plain.headers, _ACCEPT))
