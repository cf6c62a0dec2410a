"""A reply as HTTP/1.1 puts it on the wire."""

from __future__ import annotations

from http import HTTPStatus

from headrace.frontends.http.message import Buffer, HttpReply

#: Replies up to this size are joined into one buffer; larger parts stay as they are.
JOIN_BYTES = 32 * 1024
#: What every answer begins with.
BEGINNING = b"HTTP/1.1 "
_STATUS_LINES = {status.value: BEGINNING + b"%d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def serialise(reply: HttpReply, closes: bool, is_head: bool) -> list[Buffer]:
    """What to write, in order; one buffer for a small reply, uncopied parts for a large one.

    ``closes`` announces that the connection ends here. The answer to a HEAD request has no body.
    """
    status, headers, parts = reply
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
