"""Messages in gzip and deflate, in bounded steps (docs/spec/behaviours.md section 2.6)."""

from __future__ import annotations

import zlib
from collections.abc import Collection

from headrace.config.options import CompressionLevel
from headrace.frontends import inflating
from headrace.frontends.grpc.status import INTERNAL, RESOURCE_EXHAUSTED, Status
from headrace.frontends.grpc.wire import MESSAGE_BYTES
from headrace.frontends.inflating import CorruptData, TooLarge
from headrace.large import UNBOUNDED

IDENTITY, GZIP, DEFLATE = b"identity", b"gzip", b"deflate"
ACCEPTED = b"identity, deflate, gzip"

#: A compressed message may be unpacked to so many times its size, however large that is. Tensors that say
#: something pack by less; what packs by more is bounded by ``--grpc-max-decompressed-size``.
RATIO = 32

#: zlib's window bits.
DECODERS = {GZIP: zlib.MAX_WBITS | 16, DEFLATE: zlib.MAX_WBITS}

#: grpc's core picks gzip for low, else deflate, and the other if the client does not take it.
_PREFERENCES: dict[CompressionLevel, tuple[bytes, bytes]] = {
    "low": (GZIP, DEFLATE),
    "medium": (DEFLATE, GZIP),
    "high": (DEFLATE, GZIP),
}
_ZLIB_LEVELS: dict[CompressionLevel, int] = {"low": 1, "medium": 6, "high": 9}


def inflate(data: bytes | memoryview, encoding: bytes, limit: int, patience: int = UNBOUNDED) -> memoryview:
    """``data`` unpacked. Blocks: about 3 ms per MiB.

    Raises `Status` beyond ``limit``, or if ``data`` is malformed, and `Large` beyond ``patience``.
    """
    try:
        return inflating.inflate(memoryview(data), DECODERS[encoding], limit, patience)
    except TooLarge as error:
        text = f"Received message larger than max ({error.size_bytes} vs. {limit})"
        raise Status(RESOURCE_EXHAUSTED, text) from None
    except CorruptData as error:
        if error.is_truncated:
            raise Status(INTERNAL, "Decompression failed: the message is truncated") from None
        raise Status(INTERNAL, "Decompression failed due to zlib error") from None


def bound(received_bytes: int, limit: int) -> int:
    """What a message of ``received_bytes`` may unpack to, where any may to ``limit``."""
    return min(MESSAGE_BYTES, max(limit, RATIO * received_bytes))


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
