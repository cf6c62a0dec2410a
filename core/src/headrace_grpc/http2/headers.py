"""Header blocks: reading those of requests, and writing those of answers (RFC 7541; RFC 9113, section 8).

Most clients begin each block with the same few fields, each one byte (an index of the table), and append the fields
that differ from call to call: an id, a timeout. This module caches the meaning of such a beginning, its *front*, by its
fields, so that it is found wherever the fields are in the table. The meaning of the further fields is added. Blocks
that we send use the static table only, so they are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from headrace_grpc.http2.field_decoder import FieldDecoder, Fields, size_of, too_large
from headrace_grpc.http2.limits import Limits

T = TypeVar("T")

#: Fronts that are cached per connection, and the largest front that is.
_KEPT_FRONTS = 64
_KEPT_BYTES = 1024
#: A list of more fields than this counts as that many idle frames.
_USUAL_FIELDS = 100
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_NEEDED = frozenset((b":method", b":scheme", b":path"))
#: Headers of an HTTP/1 connection; RFC 9113, section 8.2.2, forbids them.
_CONNECTION_SPECIFIC = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
#: RFC 9113, section 8.2.1. A colon is allowed only as the first character of a pseudo-header.
_FORBIDDEN_IN_NAMES = bytes((*range(0x21), *b"ABCDEFGHIJKLMNOPQRSTUVWXYZ:", *range(0x7F, 0x100)))
_FORBIDDEN_IN_VALUES = b"\0\r\n"


class MalformedHeaders(Exception):
    """The header list breaks a rule of RFC 9113, section 8. The stream is reset with PROTOCOL_ERROR."""


class RequestHeaders(NamedTuple):
    """The headers that open a stream. ``fields`` are the regular headers, in order."""

    method: bytes
    path: bytes
    fields: Fields
    #: True if the list is larger than `Limits.header_list_bytes`.
    is_oversized: bool = False


@dataclass(frozen=True, slots=True)
class _Front(Generic[T]):  # a generic NamedTuple needs Python 3.11
    """The fields at the beginning of a block, and their meaning without the rest."""

    meaning: T
    fields: Fields
    size_bytes: int


class HeaderReader(Generic[T]):
    """Reads the header blocks of one connection, in order."""

    def __init__(
        self,
        interpret: Callable[[RequestHeaders], T],
        extend: Callable[[T, Fields], T | None],
        limits: Limits,
        count_idle: Callable[[int], None],
    ) -> None:
        """``interpret`` and ``extend`` are those of `Service`. ``count_idle`` counts a long list as idle frames."""
        self._interpret = interpret
        self._extend = extend
        self._count_idle = count_idle
        self._limits = limits
        self._decoder = FieldDecoder(limits.header_list_hard_bytes)
        self._fronts: dict[tuple[tuple[bytes, bytes], ...], _Front[T]] = {}

    def read(self, block: bytes) -> T:
        """Return the meaning of ``block``, which opens a stream.

        Raises `MalformedHeaders`, or `ConnectionFault` if the table may differ from the peer's afterwards.
        """
        fields = self._decoder.front(block)
        front = self._fronts.get(fields)
        if front is None:
            return self._learn(fields, block)
        begin = len(fields)
        return front.meaning if begin == len(block) else self._read_on(front, block, begin)

    def read_trailers(self, block: bytes) -> None:
        """Decode and check trailers: the table must be updated. Raises as `read` does, also for pseudo-headers."""
        for field in self._decode(block, 0):
            _check(field)

    def _read_on(self, front: _Front[T], block: bytes, begin: int) -> T:
        """Return the meaning of ``block``: ``front``, and further fields from the byte ``begin`` on."""
        own = self._decode(block, begin)
        if own and own[0][0][:1] != b":" and front.size_bytes + size_of(own) <= self._limits.header_list_bytes:
            for field in own:
                _check(field)
            meaning = self._extend(front.meaning, own)
            if meaning is not None:
                return meaning
        return self._understand(front.fields + own)

    def _learn(self, front: tuple[tuple[bytes, bytes], ...], block: bytes) -> T:
        """Return the meaning of ``block``. Cache that of its ``front`` if the front alone is a valid request."""
        begin, fields = len(front), [*front]
        meaning = self._understand(fields + self._decode(block, begin))
        size = size_of(fields)
        if size <= _KEPT_BYTES and {name for name, _ in fields} >= _NEEDED:
            if len(self._fronts) >= _KEPT_FRONTS:
                self._fronts.clear()
            own = self._understand(fields) if begin < len(block) else meaning
            self._fronts[front] = _Front(own, fields, size)
        return meaning

    def _understand(self, fields: Fields) -> T:
        size = size_of(fields)
        if size > self._limits.header_list_hard_bytes:
            raise too_large()
        request = _request(fields, _check if size > _KEPT_BYTES else _check_usual)
        return self._interpret(
            request._replace(is_oversized=True) if size > self._limits.header_list_bytes else request
        )

    def _decode(self, block: bytes, begin: int) -> Fields:
        """Return the fields of ``block`` after its front, which ends at the byte ``begin``."""
        fields = self._decoder.decode(block, begin)
        count = begin + len(fields)
        if count > _USUAL_FIELDS:
            self._count_idle(count)
        return fields


def _request(fields: Fields, check: Callable[[tuple[bytes, bytes]], None]) -> RequestHeaders:
    pseudo: dict[bytes, bytes] = {}
    for name, value in fields:
        if name[:1] != b":":
            break
        if name not in _PSEUDO or name in pseudo:
            raise MalformedHeaders("pseudo-header unknown or repeated")
        pseudo[name] = value
    if not pseudo.keys() >= _NEEDED or not pseudo[b":path"]:
        raise MalformedHeaders("pseudo-header missing")
    regular = fields[len(pseudo) :]
    for field in regular:
        check(field)
    return RequestHeaders(pseudo[b":method"], pseudo[b":path"], regular)


def _check(field: tuple[bytes, bytes]) -> None:
    """Raise `MalformedHeaders` for a field that is not an allowed regular header. A pseudo-header is not."""
    name, value = field
    if not name or len(name.translate(None, _FORBIDDEN_IN_NAMES)) < len(name) or name in _CONNECTION_SPECIFIC:
        raise MalformedHeaders("header name not allowed")
    if name == b"te" and value.lower() != b"trailers":
        raise MalformedHeaders("header 'te' must be 'trailers'")
    if len(value.translate(None, _FORBIDDEN_IN_VALUES)) < len(value):
        raise MalformedHeaders("header value not allowed")


#: Cached, because most fields repeat from call to call.
_check_usual = lru_cache(512)(_check)


#: Indexes in the static table of the header names that we send.
_STATIC_NAMES = {b"content-type": 31}
_STATUS_200 = b"\x88"


def status(code: int) -> bytes:
    """Return ``:status`` encoded, as the beginning of a header block."""
    return _STATUS_200 if code == 200 else b"\x08\x03%d" % code


def literal(name: bytes, value: bytes) -> bytes:
    """Return one header encoded without the dynamic table: it has the same meaning whatever the peer's table holds."""
    index = _STATIC_NAMES.get(name)
    head = b"\0" + _integer(len(name)) + name if index is None else b"\x0f" + bytes([index - 15])
    return head + _integer(len(value)) + value


def _integer(value: int) -> bytes:
    """Return ``value`` encoded as in RFC 7541, section 5.1, with a prefix of seven bits."""
    if value < 127:
        return bytes([value])
    out, value = bytearray([127]), value - 127
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
