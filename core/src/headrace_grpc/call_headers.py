"""The headers of calls: reading those of callers, and making those of answers.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

from headrace_grpc.http2.field_decoder import Fields
from headrace_grpc.http2.headers import RequestHeaders, literal, status
from headrace_grpc.message_framing import ACCEPTED, DECODERS, IDENTITY, Compressor
from headrace_grpc.rpc import Metadata, Rpc, only
from headrace_grpc.status import INTERNAL, OK, PUSHBACK, RESOURCE_EXHAUSTED, UNIMPLEMENTED, details

_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
#: grpc's core accepts more digits than the eight of the protocol.
_TIMEOUT_DIGITS = 9
#: A longer timeout is not worth a timer.
_NEVER_SECONDS = 7 * 86400.0

#: Headers of the transport, which are not metadata.
_RESERVED = frozenset(
    (
        *(b"te", b"content-type", b"content-length", b"host"),
        *(b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"grpc-message-type"),
    )
)
#: Characters that are not escaped in ``grpc-message``: printable ASCII without the percent sign.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_BEGIN = status(200) + literal(b"content-type", b"application/grpc")


# ---------------------------------------------------------------------- headers of callers


class Refusal(NamedTuple):
    """Ends a call because of its headers. ``block`` is the header block of the answer."""

    block: bytes


@dataclass(slots=True)
class CallHead:
    """The start of a call. Shared by calls with the same headers.

    ``timeout`` is in seconds, 0 for none. ``encoding`` is that of compressed messages. ``answers`` is that of
    compressed answers; empty for no compression. ``front`` is a head that is shared, to which this one adds ``fields``.
    """

    rpc: Rpc
    fields: Fields
    timeout: float
    encoding: bytes
    answers: bytes
    front: CallHead | None = None
    _metadata: Metadata | None = None
    #: What `only` has found in ``metadata``. None before the first one.
    _found: dict[bytes, str | None] | None = None

    @property
    def metadata(self) -> Metadata:
        if self._metadata is None:
            own, front = tuple(_metadata(self.fields)), self.front
            self._metadata = own if front is None else front.metadata + own
        return self._metadata

    def only(self, name: bytes) -> str | None:
        """Return `rpc.only` of the metadata. Looked up once for all heads with the same ``front``."""
        front = self.front
        if front is not None:
            for key, _ in self.fields:
                if key == name:
                    return only(self.metadata, name)
            return front.only(name)
        if self._found is None:
            self._found = {}
        if name not in self._found:
            self._found[name] = only(self.metadata, name)
        return self._found[name]


def read_call(table: Mapping[bytes, Rpc], compressor: Compressor, headers: RequestHeaders) -> CallHead | Refusal:
    """Return the call that ``headers`` start. ``table`` has the RPCs by path."""
    named = dict(headers.fields)
    if headers.method != b"POST":
        return Refusal(http_error(405, (literal(b"allow", b"POST"),)))
    if not _is_grpc(named.get(b"content-type", b"")):
        return Refusal(http_error(415))
    if headers.is_oversized:
        return Refusal(refusal(RESOURCE_EXHAUSTED, "received metadata size exceeds limit"))
    rpc = table.get(headers.path)
    if rpc is None:
        return Refusal(refusal(UNIMPLEMENTED, "Method not found!"))
    encoding = named.get(b"grpc-encoding", IDENTITY)
    if encoding != IDENTITY and encoding not in DECODERS:
        return Refusal(_unknown_encoding(encoding))
    timeout = _seconds(named[b"grpc-timeout"]) if b"grpc-timeout" in named else 0.0
    if timeout is None:
        return Refusal(refusal(INTERNAL, "Error parsing 'grpc-timeout' metadata"))
    accepted = named.get(b"grpc-accept-encoding", b"").replace(b" ", b"").split(b",")
    answers = compressor.choose(accepted) if rpc.operation.category == "inference" else b""
    return CallHead(rpc, headers.fields, timeout, encoding, answers)


def extended(head: CallHead, fields: Fields) -> CallHead | None:
    """Return ``head`` with more ``fields``; None if these are more than metadata and a timeout."""
    timeout: float | None = head.timeout
    for name, value in fields:
        if name == b"grpc-timeout":
            timeout = _seconds(value)
        elif name in _RESERVED:
            return None
    return None if timeout is None else CallHead(head.rpc, fields, timeout, head.encoding, head.answers, head)


def _unknown_encoding(name: bytes) -> bytes:
    text = f"grpc-encoding '{name.decode('ascii', 'replace')}' is not supported"
    return refusal(UNIMPLEMENTED, text, (literal(b"grpc-accept-encoding", ACCEPTED),))


def _is_grpc(content_type: bytes) -> bool:
    name = content_type.lower()
    return name == b"application/grpc" or name.startswith((b"application/grpc+", b"application/grpc;"))


def _seconds(timeout: bytes) -> float | None:
    """Return the seconds of ``timeout``; 0 for no limit, None if it is malformed."""
    digits, unit = timeout[:-1], _SECONDS.get(timeout[-1:])
    if unit is None or not digits.isdigit() or len(digits) > _TIMEOUT_DIGITS:
        return None
    seconds = int(digits) * unit
    # A timeout of 0 has passed already, but 0 means no timeout here.
    return 0.0 if seconds > _NEVER_SECONDS else max(seconds, 1e-9)


def _metadata(fields: Fields) -> list[tuple[str, str | bytes]]:
    result: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name in _RESERVED:
            continue
        key = name.decode("latin-1")
        if name.endswith(b"-bin"):
            result.extend((key, _binary(part)) for part in value.split(b","))
        else:
            result.append((key, value.decode("utf-8", "replace")))
    return result


def _binary(value: bytes) -> bytes:
    """Return decoded base64, with or without padding; invalid base64 is returned unchanged."""
    value = value.strip()
    try:
        return b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        return value


# ---------------------------------------------------------------------- headers of answers


def begin_block(encoding: bytes = b"") -> bytes:
    """Return the headers before the first message. ``encoding`` is the compression of messages."""
    return _BEGIN + literal(b"grpc-encoding", encoding) if encoding else _BEGIN


def trailers(code: int, message: str = "", pushback: int | None = None) -> bytes:
    """Return the trailers after the last message. The client may try again in ``pushback`` ms, if that is known."""
    block = literal(b"grpc-status", b"%d" % code)
    if pushback is not None:
        block += literal(PUSHBACK.encode(), b"%d" % pushback)
    return block + literal(b"grpc-message", quote(details(message), _PLAIN).encode()) if message else block


#: The trailers of nearly every answer.
SUCCESS = trailers(OK)


def refusal(code: int, message: str, more: Iterable[bytes] = (), pushback: int | None = None) -> bytes:
    """Return the headers of an answer without messages."""
    return b"".join((_BEGIN, *more, trailers(code, message, pushback)))


def http_error(code: int, more: Iterable[bytes] = ()) -> bytes:
    """Return the headers of an answer to a request that is not gRPC."""
    return b"".join((status(code), *more))
