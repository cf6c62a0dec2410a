"""Requests and replies between the hosts (bytes) and the handlers, with the wire form of replies.

Named tuples instead of dataclasses, because one of each is created per request: they take a third of the time of a
frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from math import ceil
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import orjson

from headrace.errors import Code, HeadraceError, InvalidArgument, ResourceExhausted, Unauthenticated, Unavailable
from headrace.frontends.failures import Failure, without_paths

Buffer: TypeAlias = "bytes | bytearray | memoryview"

#: The HTTP status of each code (docs/spec/behaviours.md section 0).
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

#: The highest ``Retry-After``: clients read it as a 32-bit number.
_LONGEST_RETRY_S = 2**31 - 1
#: The header with the length of the JSON before binary tensors, in requests and replies.
HEADER_LENGTH = b"inference-header-content-length"
#: The headers of a reply that is only JSON.
JSON_TYPE = ((b"Content-Type", b"application/json"),)
#: The headers of a reply with binary tensors: this one, and one with this name.
BINARY_TYPE, HEADER_LENGTH_NAME = (b"Content-Type", b"application/octet-stream"), b"Inference-Header-Content-Length"
#: Replies up to this size are joined into one buffer; larger parts stay as they are.
JOIN_BYTES = 32 * 1024
#: The start of every reply.
BEGINNING = b"HTTP/1.1 "
_STATUS_LINES = {status.value: BEGINNING + b"%d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}

_JSON_HEAD = _STATUS_LINES[200] + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_BINARY_HEAD = b"".join(
    (_STATUS_LINES[200], b"%b: %b\r\n" % BINARY_TYPE, HEADER_LENGTH_NAME, b": %b\r\nContent-Length: %d\r\n\r\n")
)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyTooLarge(InvalidArgument):
    """The body is larger than its route allows: status 413."""


class HttpRequest(NamedTuple):
    """One request. ``path`` is as received, without the query.

    ``headers`` have names in lower case; the values of repeated ones are joined by commas. ``received`` is their
    source: a head of HTTP/1, or names and values. ``body`` stays valid as long as there is a view of it.
    """

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: memoryview
    received: bytes | Sequence[tuple[bytes, bytes]] = ()
    #: Set if ``received`` does not have it.
    query_string: str = ""

    @property
    def query(self) -> str:
        """The query of the URL, as received."""
        if not isinstance(self.received, bytes):
            return self.query_string
        target = self.received.partition(b"\r\n")[0].split(b" ")[1:2]
        return b"".join(target).partition(b"?")[2].partition(b"#")[0].decode("latin-1")

    @property
    def raw_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Names and values of headers, as received."""
        if not isinstance(self.received, bytes):
            return self.received
        fields = [line.partition(b":") for line in self.received.split(b"\r\n")[1:-2]]
        return [(name, value.strip(b" \t")) for name, _, value in fields]


class HttpReply(NamedTuple):
    """One reply. ``parts`` are written one after the other and must not change afterwards.

    ``headers`` do not have ``Content-Length``, which the host adds.
    """

    status: int
    headers: Sequence[tuple[bytes, bytes]] = ()
    parts: Sequence[Buffer] = ()


#: The constructors would be Python calls.
new_request = cast("Callable[[tuple[object, ...]], HttpRequest]", partial(tuple.__new__, HttpRequest))
new_reply = cast("Callable[[tuple[object, ...]], HttpReply]", partial(tuple.__new__, HttpReply))


class ErrorReply(HttpReply):
    """The reply to a request that failed, with the failure. The log may say more than the reply."""

    failure: Failure

    def with_header(self, name: bytes, value: bytes) -> ErrorReply:
        """Return this reply with one more header."""
        return self._replace(headers=(*self.headers, (name, value))).of(self.failure)

    def of(self, failure: Failure) -> ErrorReply:
        """Set the failure of this new reply. Return it."""
        self.failure = failure
        return self


#: Takes the one answer to a request. Event loop only.
Reply: TypeAlias = Callable[[HttpReply], None]
#: Cancels the work of a handler, because the caller has disconnected. Event loop only.
Cancel: TypeAlias = Callable[[], object]


class ReplyStream(Protocol):
    """A streamed answer, instead of a whole `HttpReply`. Event loop only."""

    async def send(self, chunk: Buffer) -> None:
        """Send ``chunk``, which is not empty. Return when more may be sent."""

    async def end(self) -> None:
        """Finish the answer."""

    def break_off(self) -> None:
        """Close so that the caller can tell that the answer is incomplete."""


def reply_stream(reply: Reply, head: HttpReply) -> ReplyStream:
    """Return the stream for the body of an answer with the status and headers of ``head``, from a host's reply."""
    stream: ReplyStream = reply.stream(head)  # type: ignore[attr-defined]
    return stream


def json_reply(value: Any, status: int = 200) -> HttpReply:
    """Return ``value`` as a JSON body."""
    return HttpReply(status, JSON_TYPE, (orjson.dumps(value),))


def json_type_reply() -> HttpReply:
    """Return an empty success with the type of JSON, as Triton's for load and unload."""
    return HttpReply(200, JSON_TYPE)


def error_reply(error: HeadraceError) -> ErrorReply:
    """Return ``error`` in Triton's form: one JSON object with the single key ``error``."""
    status = 413 if isinstance(error, BodyTooLarge) else STATUS[error.code]
    _, headers, parts = text_error(status, without_paths(error.message))
    return ErrorReply(status, (*headers, *_advice(error)), parts).of(Failure.of(error))


def _advice(error: HeadraceError) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers with advice for a refused caller."""
    if isinstance(error, Unauthenticated) and error.challenge:
        yield b"WWW-Authenticate", " ".join(error.challenge.split()).encode("latin-1", "replace")
    if isinstance(error, ResourceExhausted | Unavailable) and error.retry_after_s is not None:
        yield b"Retry-After", b"%d" % min(max(0, ceil(error.retry_after_s)), _LONGEST_RETRY_S)


def text_error(status: int, text: str) -> HttpReply:
    """Return an error with a status of its own. ``text`` may contain anything from a caller."""
    try:
        return json_reply({"error": text}, status)
    except orjson.JSONEncodeError:  # half a surrogate pair, from a request's JSON
        return json_reply({"error": text.encode(errors="replace").decode()}, status)


def serialise(reply: HttpReply, closes: bool, is_head: bool) -> list[Buffer]:
    """Return ``reply`` as HTTP/1.1, as buffers to write in order. Large parts are not copied.

    ``closes`` adds the header that the connection ends here. The answer to a HEAD request has no body.
    """
    status, headers, parts = reply
    size = sum(map(len, parts))
    if status == 200 and size <= JOIN_BYTES and not (closes or is_head):  # most answers
        if headers is JSON_TYPE:
            return [b"".join((_JSON_HEAD % size, *parts))]
        if len(headers) == 2 and headers[0] is BINARY_TYPE and headers[1][0] is HEADER_LENGTH_NAME:
            return [b"".join((_BINARY_HEAD % (headers[1][1], size), *parts))]
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
    """Return the head of an answer whose body is sent in chunks, or ends with the connection."""
    head = [_STATUS_LINES[reply.status]]
    for name, value in reply.headers:
        head += (name, b": ", value, b"\r\n")
    if closes:
        head.append(b"Connection: close\r\n")
    head.append(b"Transfer-Encoding: chunked\r\n\r\n" if is_chunked else b"\r\n")
    return b"".join(head)
