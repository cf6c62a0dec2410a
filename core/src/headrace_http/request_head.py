"""Request heads and fields by RFC 9112. Their meaning depends on their bytes only.

So a repeated head need not be parsed again: most requests of a client have the same head as the one before.
`RequestHeadCache` keeps the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple, cast

from headrace.errors import HeadraceError, InvalidArgument, Unsupported
from headrace_hosts.cleared_cache import ClearedCache
from headrace_http.message import HttpReply, error_reply, text_error

#: The end of a head.
END = b"\r\n\r\n"
#: What a connection of HTTP/2 begins with.
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\n"
#: ``RequestHead.body_bytes`` of a chunked body.
CHUNKED = -1
#: At most 256 heads are kept, of at most 1024 bytes.
_HEADS = 256
_HEAD_BYTES = 1024
_VERSIONS = {b"HTTP/1.%d" % minor: minor for minor in range(10)}
#: The characters of an authority (RFC 3986, 3.2): unreserved, sub-delims, percent-encoded, IP literals and the port.
_HOST = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=%:[]"
#: The characters of a token (RFC 9110, 5.6.2).
TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: The bytes of a value: blanks, visible characters, and bytes beyond ASCII.
_VALUE = bytes([9, *range(32, 127), *range(128, 256)])
#: The lines of a longer head are not remembered; at most 1024 lines are.
_SHORT_BYTES, _LINES = 2048, 1024
#: The maximum digits of a length without leading zeros.
_LENGTH_DIGITS = 18
_KEPT_ALIVE = b"keep-alive"
#: Headers that decide what is read, and where it ends. Others are for the handlers.
_RULED = frozenset((b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"))


class Malformed(Exception):
    """A broken rule: ``str(error)`` says which, ``status`` is the status of the answer."""

    def __init__(self, rule: str, status: int = 400) -> None:
        super().__init__(rule)
        self.status = status


class _UnusualField(Exception):
    """A head with this field must be read rule by rule."""


class RequestHead(NamedTuple):
    """A request up to its body. ``headers`` are those of `HttpRequest`, ``raw`` is the head itself; both are constant.

    ``body_bytes`` may be `CHUNKED`. If ``closes``, the connection ends with the answer. If ``waits``, the caller wants
    a ``100 Continue`` before it sends the body. The version is HTTP/1.``minor``.
    """

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    raw: bytes = b""
    body_bytes: int = 0
    closes: bool = False
    waits: bool = False
    minor: int = 1


class Refused(Exception):
    """The request is refused because of ``error``, and the connection ends with the answer.

    ``status`` is that of the answer; 0: that of the code of ``error``.
    """

    def __init__(self, error: HeadraceError, status: int = 0) -> None:
        super().__init__(error.message)
        self.error, self.status = error, status

    @property
    def reply(self) -> HttpReply:
        """The answer in Triton's form."""
        return text_error(self.status, self.error.message) if self.status else error_reply(self.error)


class Http2Refused(Refused):
    """The client speaks HTTP/2, without asking first (RFC 9113, 3.3)."""

    #: The answer: no settings, and the reset of the first request by HTTP_1_1_REQUIRED. Clients such as curl then
    #: repeat it over HTTP/1.1, if the connection is neither closed nor ended by GOAWAY before.
    frames = bytes.fromhex("000000 04 00 00000000" + "000004 03 00 00000001 0000000d")

    def __init__(self) -> None:
        super().__init__(Unsupported("this port speaks HTTP/1.1"), 505)


def malformed(error: Malformed) -> Refused:
    """Return the refusal of a malformed request."""
    return Refused(InvalidArgument(f"malformed HTTP request: {error}"), error.status)


def parse_head(raw: bytes, most_fields: int) -> RequestHead:
    """Return the head in ``raw``, which includes its empty line. Linear time.

    Raises `Refused` also for everything that a proxy in front could read in another way.
    """
    line, *lines, _, _ = raw.split(b"\r\n")
    if len(lines) <= most_fields and len(raw) < _SHORT_BYTES:
        try:
            method, path, minor = _known_request_line(line)
            headers = dict(map(_usual_field, lines))
            if minor and len(headers) == len(lines) and b"host" in headers:
                body_bytes = int(headers[b"content-length"]) if b"content-length" in headers else 0
                return _new_head((method, path, headers, raw, body_bytes, False, False, minor))
        except (Malformed, _UnusualField):
            pass  # the code below reports the error, if there is one
    return _parse_unusual(raw, line, lines, most_fields)


def _parse_unusual(raw: bytes, line: bytes, lines: list[bytes], most_fields: int) -> RequestHead:
    """`parse_head`, rule by rule."""
    try:
        method, path, minor = parse_request_line(line)
        headers = _by_name(lines, most_fields)
        host = headers.get(b"host")
        if host is None:
            if minor:
                raise Malformed("a request of HTTP/1.1 has a Host")
        elif host.translate(None, _HOST):
            raise Malformed("the Host is not one host")  # two would be joined by a comma and a blank
        body_bytes = _body_bytes(headers, minor)
    except Malformed as error:
        raise malformed(error) from None
    # HTTP/1.0 would need a header for keep-alive, which is not supported.
    connection = headers.get(b"connection", _KEPT_ALIVE)
    closes = not minor or (connection != _KEPT_ALIVE and "close" in tokens(connection))
    waits = b"expect" in headers and minor > 0 and headers[b"expect"].lower() == b"100-continue"
    return RequestHead(method, path, headers, raw, body_bytes, closes, waits, minor)


def parse_request_line(line: bytes) -> tuple[str, str, int]:
    """Return method, path and minor version. Raises `Malformed`, and `Refused` for what no host supports."""
    parts = line.split(b" ")
    if len(parts) != 3:
        raise Malformed("a request line is a method, a target and a version, with one blank between them")
    method, target, version = parts
    if not method or method.translate(None, TOKEN):
        raise Malformed("the method is not a token")
    minor = _VERSIONS.get(version)
    if minor is None:
        if len(version) == 8 and version.startswith(b"HTTP/") and version[5:6].isdigit() and version[6:7] == b".":
            raise Malformed("the version is another than 1.1", 505)
        raise Malformed("the request line does not end in a version of HTTP")
    if method == b"CONNECT":
        raise Refused(Unsupported("Method Not Allowed"), 405)
    path = path_of(target)
    if path == "*" and method != b"OPTIONS":
        raise Malformed("'*' is a target of OPTIONS only")
    return method.decode(), path, minor


#: Callers use the same few paths again and again.
_known_request_line = lru_cache(1024)(parse_request_line)


def read_fields(raw: bytes, most: int) -> dict[bytes, bytes]:
    """Return the fields in ``raw`` (RFC 9112, 5), whose lines end in CRLF: values by names in lower case.

    Values are without surrounding blanks; those of a repeated name are joined by commas. Raises `Malformed` for an
    invalid field, or for more than ``most``.
    """
    lines = raw.split(b"\r\n")
    if lines.pop():
        raise Malformed("a line does not end in CRLF")
    return _by_name(lines, most)


def _by_name(lines: list[bytes], most: int) -> dict[bytes, bytes]:
    if len(lines) > most:
        raise Malformed(f"more than {most} headers", 431)
    try:
        by_name = dict(map(_field, lines))
    except Malformed:
        if not b"".join(lines).translate(None, _VALUE):
            raise
        raise Malformed("a header has a control character, or a line does not end in CRLF") from None
    if len(by_name) < len(lines):
        by_name.clear()
        for key, value in map(_field, lines):
            by_name[key] = value if key not in by_name else by_name[key] + b", " + value
    return by_name


def path_of(target: bytes) -> str:
    """Return the path of a request target, without query, scheme and host.

    Raises `Malformed`.
    """
    path = target.partition(b"?")[0].decode("latin-1")
    if not path.isprintable() and any(char <= " " or char == "\x7f" for char in path):
        raise Malformed("the target has control characters")
    if path[:1] == "/" or target == b"*":
        return path
    scheme, separator, rest = path.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        return "/" + rest.partition("/")[2]
    raise Malformed("the target is not a path")


def tokens(value: bytes) -> list[str]:
    """Return the members of a list, in lower case."""
    return [token.strip().lower() for token in value.decode("latin-1").split(",")]


def _field(line: bytes) -> tuple[bytes, bytes]:
    """Return the name in lower case, and the value. Raises `Malformed`."""
    name, colon, value = line.partition(b":")
    if not colon or not name or name.translate(None, TOKEN) or value.translate(None, _VALUE):
        raise Malformed("a header is a token, a colon and a value")
    return name.lower(), value.strip(b" \t")


class _UsualFields(ClearedCache[bytes, tuple[bytes, bytes]]):
    """Fields by their lines: most lines of a head are repeated, whatever else changes.

    Only fields without special meaning for the head. Others raise `_UnusualField` or `Malformed`.
    """

    def __missing__(self, line: bytes) -> tuple[bytes, bytes]:
        field = name, value = _field(line)
        if name in _RULED and not _is_usual(name, value):
            raise _UnusualField
        self.keep(line, field)
        return field


def _is_usual(name: bytes, value: bytes) -> bool:
    if name == b"host":
        return not value.translate(None, _HOST)
    if name == b"content-length":
        return value.isdigit() and len(value) <= _LENGTH_DIGITS
    return name == b"connection" and value.lower() == _KEPT_ALIVE


#: Makes no Python call for a known line.
_usual_field = _UsualFields(_LINES).__getitem__
#: The constructor would be a Python call.
_new_head = cast("Callable[[tuple[object, ...]], RequestHead]", partial(tuple.__new__, RequestHead))


def _body_bytes(headers: Mapping[bytes, bytes], minor: int) -> int:
    """Return the length of the body (RFC 9112, 6.3)."""
    coding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise Malformed("the length of the body is stated twice")
        if not minor:
            raise Malformed("HTTP/1.0 has no Transfer-Encoding")
        *others, last = tokens(coding)
        if last != "chunked" or "chunked" in others:
            raise Malformed("the last transfer coding of a request is chunked, once")
        if others:
            raise Malformed(f"the transfer coding {others[0][:100]!r} is not supported", 501)
        return CHUNKED
    if length is None:
        return 0
    if length.isdigit() and len(length) <= _LENGTH_DIGITS:
        return int(length)
    digits = length.lstrip(b"0")
    if not length.isdigit():
        raise Malformed("Content-Length is not a number")
    if len(digits) > _LENGTH_DIGITS:
        raise Malformed("Content-Length is beyond all bounds")
    return int(digits or b"0")


class HeadSearch:
    """Takes heads from the front of the received bytes of one connection. Each byte is searched once."""

    __slots__ = ("_empty_lines", "_most_bytes", "_searched")

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.begin()

    def begin(self) -> None:
        """Start anew: the received bytes are gone."""
        self._searched = 0  # this many received bytes contain no end of a head
        self._empty_lines = 0

    def drop_empty_lines(self, received: bytearray) -> None:
        """Drop empty lines at the front. Raises `Malformed`."""
        if not received.startswith(b"\r\n"):
            return
        size = len(received) - len(received.lstrip(b"\r\n"))
        lines = size // 2
        if received[: 2 * lines] != b"\r\n" * lines:
            raise Malformed("an empty line does not end in CRLF")
        del received[: 2 * lines]
        self._empty_lines += lines
        if self._empty_lines > self._most_bytes:
            raise Malformed("there are too many empty lines")

    def take(self, received: bytearray) -> bytes | None:
        """Return the head at the front, or None if it is incomplete.

        Raises `Malformed` for one that is too long, and at once `Malformed` or `Refused` if it can never be valid.
        """
        searched = self._searched
        end = received.find(END, max(0, searched - len(END))) + len(END)
        if end < len(END):
            end = 0
            if received.count(b"\n", searched) != received.count(b"\r\n", max(0, searched - 1)):
                raise Malformed("a line does not end in CRLF")
            line_end = received.find(b"\r\n")
            if line_end >= max(0, searched - 1):
                parse_request_line(bytes(received[:line_end]))
        if (end or len(received)) > self._most_bytes:
            raise Malformed(f"the head exceeds {self._most_bytes} bytes", 431)
        if not end:
            self._searched = len(received)
            return None
        with memoryview(received) as view:
            raw = view[:end].tobytes()
        del received[:end]
        self.begin()
        return raw


class RequestHeadCache:
    """Heads by their bytes, for all connections: equal bytes have the same meaning everywhere."""

    def __init__(self) -> None:
        self._known = ClearedCache[bytes, RequestHead](_HEADS)
        #: Returns the head of these bytes, or None, by one look-up.
        self.find = self._known.get

    def keep(self, raw: bytes, head: RequestHead) -> None:
        """Keep ``head`` as the meaning of ``raw``, if that is short."""
        if len(raw) <= _HEAD_BYTES:
            self._known.keep(raw, head)
