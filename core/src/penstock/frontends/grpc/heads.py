"""What the headers of a call say (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md)."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.frontends.grpc import blocks
from penstock.frontends.grpc.compression import ACCEPTED, DECODERS, IDENTITY
from penstock.frontends.grpc.context import Metadata
from penstock.frontends.grpc.rpcs import Rpc
from penstock.frontends.grpc.status import INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED
from penstock.frontends.http2.headers import Fields, RequestHeaders, literal

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


@dataclass(slots=True)
class Head:
    """The beginning of a call. Shared by the calls that begin alike.

    ``refusal`` is a header block that ends the call at once; otherwise there is an ``rpc``.
    ``timeout`` is in seconds, 0 for none. ``accepts`` are the names of encodings.
    """

    fields: Fields
    rpc: Rpc | None = None
    refusal: bytes = b""
    timeout: float = 0.0
    encoding: bytes = IDENTITY
    accepts: frozenset[bytes] = frozenset()
    _metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = tuple(_metadata(self.fields))
        return self._metadata


def read(table: Mapping[bytes, Rpc], headers: RequestHeaders) -> Head:
    """What ``headers`` ask for. ``table`` has the RPCs by path."""
    head = Head(headers.fields, table.get(headers.path))
    named = dict(headers.fields)
    if headers.method != b"POST":
        head.refusal = blocks.http_error(405, (literal(b"allow", b"POST"),))
    elif not _is_grpc(named.get(b"content-type", b"")):
        head.refusal = blocks.http_error(415)
    elif headers.is_oversized:
        head.refusal = blocks.refusal(RESOURCE_EXHAUSTED, "received metadata size exceeds limit")
    elif head.rpc is None:
        head.refusal = blocks.refusal(UNIMPLEMENTED, "Method not found!")
    else:
        _read_transport(head, named)
    return head


def _read_transport(head: Head, named: Mapping[bytes, bytes]) -> None:
    encoding = named.get(b"grpc-encoding", IDENTITY)
    if encoding != IDENTITY and encoding not in DECODERS:
        text = f"grpc-encoding '{encoding.decode('ascii', 'replace')}' is not supported"
        head.refusal = blocks.refusal(UNIMPLEMENTED, text, (literal(b"grpc-accept-encoding", ACCEPTED),))
    head.encoding = encoding
    head.accepts = frozenset(name.strip() for name in named.get(b"grpc-accept-encoding", b"").split(b","))
    timeout = named.get(b"grpc-timeout")
    if timeout is not None:
        seconds = _seconds(timeout)
        if seconds is None:
            head.refusal = blocks.refusal(INTERNAL, "Error parsing 'grpc-timeout' metadata")
        else:
            head.timeout = seconds


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
