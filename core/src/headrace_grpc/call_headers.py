"""The headers of calls: what those of a caller say, and the header blocks that calls are answered with.

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
from headrace_grpc.rpc import Metadata, Rpc
from headrace_grpc.status import INTERNAL, OK, RESOURCE_EXHAUSTED, UNIMPLEMENTED, details

_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
#: grpc's core takes more digits than the eight that the protocol has.
_TIMEOUT_DIGITS = 9
#: Nobody waits for so long: no timer is worth it.
_NEVER_SECONDS = 7 * 86400.0

#: What is the transport's own, and no metadata.
_RESERVED = frozenset(
    (
        *(b"te", b"content-type", b"content-length", b"host"),
        *(b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"grpc-message-type"),
    )
)
#: What stays as it is in ``grpc-message``: printable ASCII without the percent sign.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_BEGIN = status(200) + literal(b"content-type", b"application/grpc")


# ---------------------------------------------------------------------- what a caller says


class Refusal(NamedTuple):
    """A call that its headers end, by the header ``block`` of the answer."""

    block: bytes


@dataclass(slots=True)
class CallHead:
    """The beginning of a call. Shared by the calls that begin alike.

    ``timeout`` is in seconds, 0 for none. ``encoding`` is that of packed messages; ``answers`` is
    the one that answers are packed in, empty if they are not.
    """

    rpc: Rpc
    fields: Fields
    timeout: float
    encoding: bytes
    answers: bytes
    _metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = tuple(_metadata(self.fields))
        return self._metadata


def read_call(table: Mapping[bytes, Rpc], compressor: Compressor, headers: RequestHeaders) -> CallHead | Refusal:
    """What ``headers`` ask for. ``table`` has the RPCs by path."""
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
    """``head`` with further ``fields`` behind its own; None if that takes more than metadata and a timeout."""
    timeout: float | None = head.timeout
    for name, value in fields:
        if name == b"grpc-timeout":
            timeout = _seconds(value)
        elif name in _RESERVED:
            return None
    return None if timeout is None else CallHead(head.rpc, head.fields + fields, timeout, head.encoding, head.answers)


def _unknown_encoding(name: bytes) -> bytes:
    text = f"grpc-encoding '{name.decode('ascii', 'replace')}' is not supported"
    return refusal(UNIMPLEMENTED, text, (literal(b"grpc-accept-encoding", ACCEPTED),))


def _is_grpc(content_type: bytes) -> bool:
    name = content_type.lower()
    return name == b"application/grpc" or name.startswith((b"application/grpc+", b"application/grpc;"))


def _seconds(timeout: bytes) -> float | None:
    """What is left to the call; 0 for ever, None if ``timeout`` is malformed."""
    digits, unit = timeout[:-1], _SECONDS.get(timeout[-1:])
    if unit is None or not digits.isdigit() or len(digits) > _TIMEOUT_DIGITS:
        return None
    seconds = int(digits) * unit
    # Zero has passed already, but 0 stands for no timeout.
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
    """Base64 with or without its padding; what is neither stays as it came."""
    value = value.strip()
    try:
        return b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        return value


# ---------------------------------------------------------------------- what is answered


def begin_block(encoding: bytes = b"") -> bytes:
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
