"""What travels between the hosts (bytes) and the handlers (meaning): requests, and replies with their wire form.

Named tuples and not dataclasses: one of each is made per request, and these are made in a third
of the time of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from math import ceil
from typing import Any, NamedTuple, Protocol, TypeAlias

import orjson

from headrace.errors import Code, HeadraceError, ResourceExhausted, Unauthenticated
from headrace.frontends.failures import Failure, shown

Buffer: TypeAlias = "bytes | bytearray | memoryview"

#: From code to HTTP status (docs/spec/behaviours.md section 0).
STATUS = {
    Code.UNKNOWN: 400,
    Code.INTERNAL: 500,
    Code.NOT_FOUND: 404,
    Code.INVALID_ARGUMENT: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
}

#: The length of the JSON in front of binary tensors: as received, and as sent.
HEADER_LENGTH = b"inference-header-content-length"
#: The headers of an answer that is JSON and nothing else.
JSON_TYPE = ((b"Content-Type", b"application/json"),)
#: Replies up to this size are joined into one buffer; larger parts stay as they are.
JOIN_BYTES = 32 * 1024
#: What every answer begins with.
BEGINNING = b"HTTP/1.1 "
_STATUS_LINES = {status.value: BEGINNING + b"%d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}

_JSON_ANSWER = _STATUS_LINES[200] + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpRequest(NamedTuple):
    """One request. ``path`` is as received, without the query. ``headers`` have names in lower
    case and the values of repeated ones joined by commas; ``received`` is what they were read from, a head of HTTP/1,
    or names and values. ``body`` stays valid for as long as somebody keeps a view of it."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: memoryview
    received: bytes | Sequence[tuple[bytes, bytes]] = ()
    #: Set where ``received`` does not have it.
    query_string: str = ""

    @property
    def query(self) -> str:
        """What stands behind the ``?`` of the URL, as received; few ask."""
        if not isinstance(self.received, bytes):
            return self.query_string
        target = self.received.partition(b"\r\n")[0].split(b" ")[1:2]
        return b"".join(target).partition(b"?")[2].partition(b"#")[0].decode("latin-1")

    @property
    def raw_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Names and values as received; few ask."""
        if not isinstance(self.received, bytes):
            return self.received
        fields = [line.partition(b":") for line in self.received.split(b"\r\n")[1:-2]]
        return [(name, value.strip(b" \t")) for name, _, value in fields]


class HttpReply(NamedTuple):
    """One answer. ``parts`` are written one after the other and must not change afterwards.
    ``headers`` leave out ``Content-Length``, which the host adds."""

    status: int
    headers: Sequence[tuple[bytes, bytes]] = ()
    parts: Sequence[Buffer] = ()


class ErrorReply(HttpReply):
    """The answer to a request that failed, which remembers why. The log may say more than the answer does."""

    failure: Failure


#: Takes the one answer to a request. Event loop only.
Reply: TypeAlias = Callable[[HttpReply], None]
#: Tells a handler that the caller has gone. Event loop only.
Cancel: TypeAlias = Callable[[], object]


class ReplyStream(Protocol):
    """An answer that is written while it is made, in place of the one that a `Reply` takes. Event loop only."""

    async def send(self, chunk: Buffer) -> None:
        """Return once the caller has taken so much that more may be sent. ``chunk`` is not empty."""

    async def end(self) -> None:
        """That was all."""

    def break_off(self) -> None:
        """Have the caller see that this is not all, and that no more will come."""


def reply_stream(reply: Reply, head: HttpReply) -> ReplyStream:
    """What takes the body of an answer with the status and the headers of ``head``. Hosts' replies have it."""
    stream: ReplyStream = reply.stream(head)  # type: ignore[attr-defined]
    return stream


def json_reply(value: Any, status: int = 200) -> HttpReply:
    """``value`` as a JSON body."""
    return HttpReply(status, JSON_TYPE, (orjson.dumps(value),))


def json_type_reply() -> HttpReply:
    """An empty success that is marked as JSON, as Triton marks those of load and unload."""
    return HttpReply(200, JSON_TYPE)


def error_reply(error: HeadraceError) -> HttpReply:
    """``error`` as Triton words errors: one JSON object with the single key ``error``."""
    status, headers, parts = text_error(STATUS[error.code], shown(error.message))
    reply = ErrorReply(status, (*headers, *_advice(error)), parts)
    reply.failure = Failure.of(error)
    return reply


def _advice(error: HeadraceError) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers that tell a refused caller what to do."""
    if isinstance(error, Unauthenticated) and error.challenge:
        yield b"WWW-Authenticate", " ".join(error.challenge.split()).encode("latin-1", "replace")
    if isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
        yield b"Retry-After", b"%d" % max(0, ceil(error.retry_after_s))


def text_error(status: int, text: str) -> HttpReply:
    """An error with a status of its own; ``text`` may hold anything a caller sent."""
    try:
        return json_reply({"error": text}, status)
    except orjson.JSONEncodeError:  # half a surrogate pair, out of a request's JSON
        return json_reply({"error": text.encode(errors="replace").decode()}, status)


def serialise(reply: HttpReply, closes: bool, is_head: bool) -> list[Buffer]:
    """``reply`` as HTTP/1.1: what to write, in order; one buffer for a small reply, uncopied parts for a large one.

    ``closes`` announces that the connection ends here. The answer to a HEAD request has no body.
    """
    status, headers, parts = reply
    if headers is JSON_TYPE and status == 200 and len(parts) == 1 and not (closes or is_head):  # what most answers are
        (body,) = parts
        if len(body) <= JOIN_BYTES:
            return [_JSON_ANSWER % (len(body), body)]
    size = sum([len(part) for part in parts])
    head = [_STATUS_LINES[status]]
    for name, value in headers:
        head += (name, b": ", value, b"\r\n")
    if closes:
        head.append(b"Connection: close\r\n")
    head.append(b"Content-Length: %d\r\n\r\n" % size)
    if is_head:
        parts = ()
    if size <= JOIN_BYTES:
        return [b"".join([*head, *parts])]
    return [b"".join(head), *parts]


def stream_head(reply: HttpReply, closes: bool, is_chunked: bool) -> bytes:
    """The head of an answer whose body comes in chunks, or else ends with the connection."""
    head = [_STATUS_LINES[reply.status]]
    for name, value in reply.headers:
        head += (name, b": ", value, b"\r\n")
    if closes:
        head.append(b"Connection: close\r\n")
    head.append(b"Transfer-Encoding: chunked\r\n\r\n" if is_chunked else b"\r\n")
    return b"".join(head)
