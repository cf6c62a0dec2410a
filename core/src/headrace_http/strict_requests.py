"""One grammar for both hosts: a request that `parse_head` refuses never reaches another server's parser.

Other parsers are tolerant: they join folded lines, accept LF for CRLF, and accept names and codings that two parsers
read in two ways.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace_http.caller_limits import HttpLimits
from headrace_http.request_body import ChunkedBody
from headrace_http.request_head import (
    CHUNKED,
    HeadSearch,
    Malformed,
    Refused,
    RequestHead,
    malformed,
    parse_head,
)
from headrace_http.socket_frames import SocketFrames

_HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: The placeholder for a refused head; it is answered with the refusal.
_REFUSED = b"GET / HTTP/1.1\r\nHost: refused\r\nConnection: close\r\n\r\n"


class StrictRequests:
    """Passes valid requests on byte for byte. The first invalid head is replaced, and answered with `refusal`.

    A body that breaks the rules ends there, and is answered with `refusal`, too. A connection that starts as HTTP/2 is
    passed on unchanged. An upgrade is removed: the connection stays HTTP/1.1. Only the handshake for a path
    with a WebSocket is passed on, without extensions, and after it the frames of messages up to the limit.
    """

    def __init__(self, limits: HttpLimits, socket_limit: Callable[[str], int] | None = None) -> None:
        """``socket_limit`` returns how many bytes a message to the WebSocket of a path may have; 0 if it has none."""
        self._socket_limit = socket_limit
        #: The frames after the handshake of a WebSocket.
        self.frames: SocketFrames | None = None
        #: Requests that were passed on completely.
        self.whole = 0
        self.is_http_2 = False
        #: The refusal of the request after the `whole` ones.
        self.refusal: Refused | None = None
        self._limits = limits
        self._rest = bytearray()
        self._search = HeadSearch(limits.head_bytes)
        self._missing = 0  # bytes of a body of known length
        self._chunked: ChunkedBody | None = None
        self._is_last = self._is_over = False

    @property
    def is_arriving(self) -> bool:
        """True if a request has begun and is incomplete."""
        return bool(self._rest or self._missing or self._chunked is not None)

    def pass_on(self, data: bytes) -> bytes:
        """Return the bytes to read after those passed on before."""
        if self.is_http_2:
            return data
        if self._is_over:
            return b""
        self._rest += data
        passed = bytearray()
        try:
            while self._rest and self._take(passed):
                pass
        except (Malformed, Refused) as error:
            self.refusal = error if isinstance(error, Refused) else malformed(error)
            if not self._missing and self._chunked is None:
                passed += _REFUSED
            self._end()
        return bytes(passed)

    def _take(self, passed: bytearray) -> bool:
        """Move received bytes to ``passed``. Return False if there are too few."""
        rest = self._rest
        if self.frames is not None:
            passed += self.frames.pass_on(bytes(rest))
            rest.clear()
            return False
        if self._missing:
            size = min(self._missing, len(rest))
            passed += rest[:size]
            del rest[:size]
            self._missing -= size
            if not self._missing:
                self._complete()
            return True
        if self._chunked is not None:
            chunked = self._chunked
            is_whole = chunked.feed(rest)
            if gathered := chunked.body:  # as one chunk, however many there were
                passed += b"%x\r\n%s\r\n" % (len(gathered), gathered)
                gathered.clear()
            if is_whole:
                passed += b"0\r\n\r\n"
                self._chunked = None
                self._complete()
            return is_whole or chunked.has_more
        return self._take_head(passed)

    def _take_head(self, passed: bytearray) -> bool:
        rest = self._rest
        self._search.drop_empty_lines(rest)
        if not self.whole and _HTTP_2.startswith(rest[: len(_HTTP_2)]):
            if len(rest) < len(_HTTP_2):
                return False
            self.is_http_2 = True
            passed += rest
            rest.clear()
            return True
        raw = self._search.take(rest)
        if raw is None:
            return False
        self._begin(parse_head(raw, self._limits.headers), raw, passed)
        return True

    def _begin(self, head: RequestHead, raw: bytes, passed: bytearray) -> None:
        self._is_last = head.closes
        if b"upgrade" in head.headers:
            limit = self._socket_limit(head.path) if self._socket_limit is not None and _is_handshake(head) else 0
            raw = _without(raw, b"upgrade:" if not limit else b"sec-websocket-extensions:")
            self.frames = SocketFrames(limit) if limit else None
        passed += raw
        if head.body_bytes == CHUNKED:
            self._chunked = ChunkedBody(self._limits, self._judge)
        elif head.body_bytes:
            self._missing = head.body_bytes
        else:
            self._complete()

    def _judge(self, size: int, chunks: int) -> None:
        """Limit the chunks. The application limits the size."""
        if chunks > self._limits.chunks:
            raise Malformed("the body has too many chunks")

    def _complete(self) -> None:
        self.whole += 1
        if self._is_last:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._rest.clear()
        self._missing, self._chunked = 0, None


def _is_handshake(head: RequestHead) -> bool:
    """True if ``head`` opens a WebSocket (RFC 6455, 4.2.1)."""
    headers = head.headers
    tokens = [token.strip().lower() for token in headers.get(b"connection", b"").split(b",")]
    return (
        (head.method, head.minor, head.body_bytes, b"upgrade" in tokens) == ("GET", 1, 0, True)
        and headers[b"upgrade"].lower() == b"websocket"
        and headers.get(b"sec-websocket-version") == b"13"
        and b"sec-websocket-key" in headers
    )


def _without(raw: bytes, name: bytes) -> bytes:
    """Return the head ``raw`` without the headers of one name, which ends with a colon."""
    return b"\r\n".join(line for line in raw.split(b"\r\n") if not line.lower().startswith(name))
