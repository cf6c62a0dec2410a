"""The header blocks that calls are answered with."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

from headrace.frontends.grpc.status import OK, details
from headrace.frontends.http2.headers import literal, status

#: What stays as it is in ``grpc-message``: printable ASCII without the percent sign.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_BEGIN = status(200) + literal(b"content-type", b"application/grpc")


def begin(encoding: bytes = b"") -> bytes:
    """Before the first message; ``encoding`` is what messages are compressed with."""
    return _BEGIN + literal(b"grpc-encoding", encoding) if encoding else _BEGIN


def trailers(code: int, message: str = "") -> bytes:
    """Behind the last message."""
    block = literal(b"grpc-status", b"%d" % code)
    return block + literal(b"grpc-message", quote(details(message), _PLAIN).encode()) if message else block


#: Behind nearly every answer.
SUCCESS = trailers(OK)


def refusal(code: int, message: str, more: Iterable[bytes] = ()) -> bytes:
    """In place of everything, if there is no message."""
    return b"".join((_BEGIN, *more, trailers(code, message)))


def http_error(code: int, more: Iterable[bytes] = ()) -> bytes:
    """For what is no gRPC."""
    return b"".join((status(code), *more))
