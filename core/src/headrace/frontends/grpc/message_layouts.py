"""Messages that are laid out like one before, and are not parsed."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.frontends.grpc import wire
from headrace.frontends.grpc.decode import Decoded, decode
from headrace.frontends.grpc.wire import Buffer, MessageLayout, RawRequest
from headrace.frontends.recognition import FIXED_BYTES, LAYOUTS, Recent, RequestLayout, fixed_tensors
from headrace.large import LARGE_BYTES
from headrace.messages.request import Parameter

#: Bytes at the beginning that tell layouts of one size apart: the name of the model, as a rule.
_KEY_BYTES = 24


class MessageLayoutCache:
    """Unpacks and decodes messages."""

    def __init__(self) -> None:
        self._known = Recent[tuple[int, bytes], MessageLayout](LAYOUTS)

    def unpack(self, body: Buffer) -> RawRequest:
        """`wire.unpack`, which a message whose layout is known is spared."""
        layout = self._known.get((len(body), bytes(body[:_KEY_BYTES])))
        if layout is not None and layout.fits(body):
            return RawRequest(layout.message, (), body, layout)
        return wire.unpack(body)

    def decode(self, raw_request: RawRequest, forwarded: Mapping[str, Parameter] | None = None) -> Decoded:
        """What ``raw_request`` asks for, as `headrace.frontends.grpc.decode.decode` says; `Large` is for
        that itself."""
        if raw_request.layout is not None:
            known, message = raw_request.layout, raw_request.message
            request = known.layout.request(message.model_name, message.model_version, raw_request.body, forwarded)
            return Decoded(request, known.classes, known.empty_final)
        decoded = decode(raw_request, forwarded, LARGE_BYTES)
        if not forwarded:
            self._keep(raw_request.body, decoded)
        return decoded

    def _keep(self, body: Buffer, decoded: Decoded) -> None:
        """Know the layout of ``body``, of which ``decoded`` was made, if one like it may come again."""
        request = decoded.request
        if request.is_in_sequence:  # those of many sequences come by turns, and all of them have one key
            return
        tensors = fixed_tensors(request)
        if tensors is None:
            return
        spans = wire.raw_spans(body)
        if spans is None or len(spans) != len(tensors):
            return
        ends = [0, *[span.end for span in spans]]
        begins = [span.begin for span in spans]
        gaps = list(zip(ends, [*begins, len(body)], strict=True))
        fixed = [bytes(body[begin:end]) for begin, end in gaps]
        if sum(map(len, fixed)) > FIXED_BYTES:
            return
        layout = RequestLayout.of(request, tensors, begins)
        message = wire.without_raw(body, spans)
        known = MessageLayout(gaps, fixed, layout, message, decoded.classes, decoded.empty_final)
        self._known.keep((len(body), bytes(body[:_KEY_BYTES])), known)
