"""Binary tensors behind a cloud's proxy, which passes only the content type: it carries the length of the JSON."""

from __future__ import annotations

from dataclasses import dataclass

from headrace import Forwarded, HttpReply, HttpRequest

#: The header of KServe v2 for the length of the JSON. Only the content type counts behind a proxy.
_LENGTH = b"inference-header-content-length"
_PARAMETER = b"json-header-size="


@dataclass(frozen=True, slots=True)
class BinaryContent:
    """A content type of a cloud, such as ``application/vnd.vertex-ai-triton.binary+json``."""

    media_type: bytes
    #: Answers have it, too. False: they have the header of KServe v2, as on the first port.
    is_answered: bool = True

    def forwarded(self, request: HttpRequest, method: str, path: str) -> Forwarded:
        """Return what ``request`` stands for: ``path`` of KServe v2. A request by GET has no body."""
        headers = {name: value for name, value in request.headers.items() if name != _LENGTH}
        media_type, _, rest = headers.get(b"content-type", b"").partition(b";")
        parameter = rest.strip()
        if media_type.strip().lower() == self.media_type and parameter.startswith(_PARAMETER):
            headers[_LENGTH] = parameter.removeprefix(_PARAMETER)
        body = memoryview(b"") if method == "GET" else request.body
        found = Forwarded(request._replace(method=method, path=path, headers=headers, body=body))
        return found._replace(change=self.answer) if self.is_answered else found

    def answer(self, reply: HttpReply) -> HttpReply:
        """Return ``reply`` with the length of its JSON in the content type, if it has binary tensors."""
        length = next((value for name, value in reply.headers if name.lower() == _LENGTH), None)
        if length is None:
            return reply
        content_type = b"%b;%b%b" % (self.media_type, _PARAMETER, length)
        others = [(name, value) for name, value in reply.headers if name.lower() not in (_LENGTH, b"content-type")]
        return HttpReply(reply.status, [(b"Content-Type", content_type), *others], reply.parts)
