"""Messages in gzip and deflate, in bounded steps (behaviours.md section 2.6)."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator

from penstock.config.options import CompressionLevel
from penstock.frontends.grpc.status import INTERNAL, RESOURCE_EXHAUSTED, Status

IDENTITY, GZIP, DEFLATE = b"identity", b"gzip", b"deflate"
ACCEPTED = b"identity, deflate, gzip"

#: zlib's window bits.
DECODERS = {GZIP: zlib.MAX_WBITS | 16, DEFLATE: zlib.MAX_WBITS}
_STEP_BYTES = 256 * 1024

#: grpc's core picks gzip for low, else deflate, and the other if the client does not take it.
_PREFERENCES: dict[CompressionLevel, tuple[bytes, bytes]] = {
    "low": (GZIP, DEFLATE),
    "medium": (DEFLATE, GZIP),
    "high": (DEFLATE, GZIP),
}
_ZLIB_LEVELS: dict[CompressionLevel, int] = {"low": 1, "medium": 6, "high": 9}


def inflate(data: bytes | memoryview, encoding: bytes, limit: int) -> bytes:
    """``data`` unpacked, never holding much more than ``limit`` bytes. Blocks: about 3 ms per MiB.

    Raises `Status` beyond ``limit``, or if ``data`` is malformed.
    """
    unpacker = zlib.decompressobj(DECODERS[encoding])
    parts: list[bytes] = []
    size = 0
    try:
        for part in _steps(unpacker, memoryview(data)):
            size += len(part)
            if size > limit:
                raise Status(RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {limit})")
            parts.append(part)
    except zlib.error:
        raise Status(INTERNAL, "Decompression failed due to zlib error") from None
    if not unpacker.eof:
        raise Status(INTERNAL, "Decompression failed: the message is truncated")
    return b"".join(parts)


def _steps(unpacker: zlib._Decompress, data: memoryview) -> Iterator[bytes]:
    """``data`` in pieces, because zlib copies what it has not yet read of each piece with every step."""
    for at in range(0, len(data), _STEP_BYTES):
        rest: bytes | memoryview = data[at : at + _STEP_BYTES]
        while rest and not unpacker.eof:
            yield unpacker.decompress(rest, _STEP_BYTES)
            rest = unpacker.unconsumed_tail


class Compressor:
    """What ``--grpc-infer-response-compression-level`` asks for."""

    def __init__(self, level: CompressionLevel) -> None:
        self._preferences = _PREFERENCES.get(level, ())
        self._level = _ZLIB_LEVELS.get(level, 0)

    def choose(self, accepts: Collection[bytes]) -> bytes:
        """The encoding for a client that takes ``accepts``; empty for none."""
        return next((name for name in self._preferences if name in accepts), b"")

    def deflate(self, data: bytes, encoding: bytes) -> bytes:
        """``data`` packed. Blocks: up to 50 ms per MiB."""
        packer = zlib.compressobj(self._level, wbits=DECODERS[encoding])
        return packer.compress(data) + packer.flush()
