"""Compressed bodies, both ways (docs/spec/behaviours.md section 1.3, request headers)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

from headrace.errors import InvalidArgument
from headrace.frontends.http.message import Buffer
from headrace.frontends.inflating import Malformed, TooLarge, inflate

#: ``Content-Encoding`` values that a request may have.
DECODABLE = (b"", b"identity", b"gzip", b"deflate")
#: ``wbits`` of zlib for what we send; what we receive is told apart by its first bytes.
_WBITS = {b"gzip": 31, b"deflate": 15}
_DETECT = 32 + 15


def decompress(body: memoryview, limit_bytes: int, patience: int) -> memoryview:
    """``body`` inflated, gzip or zlib.

    Raises `InvalidArgument` if empty, malformed, truncated, or larger than ``limit_bytes``, and `Large`
    beyond ``patience``.
    """
    if not body.nbytes:
        raise InvalidArgument("nothing to be decompressed")
    try:
        return inflate(body, _DETECT, limit_bytes, patience)
    except Malformed as error:
        raise InvalidArgument(f"compressed request body {error}") from None
    except TooLarge:
        raise too_large(limit_bytes) from None


def too_large(limit_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"Decompressed data size exceeds the maximum allowed value of {limit_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def compress(parts: Sequence[Buffer], encoding: bytes) -> bytes:
    """``parts`` as one compressed body. Copies every byte it does not save."""
    deflater = zlib.compressobj(wbits=_WBITS[encoding])
    return b"".join([*[deflater.compress(part) for part in parts], deflater.flush()])


@lru_cache(maxsize=256)
def response_encoding(accepted: bytes) -> bytes:
    """``gzip``, ``deflate`` or ``identity``: the highest weight in an ``Accept-Encoding``.

    The first wins among equals; an entry with a weight that is no number is skipped.
    """
    best, best_weight = b"identity", 0.0
    for entry in accepted.split(b","):
        name, _, weight_text = entry.partition(b";")
        name, weight = name.strip(), _weight(weight_text.strip())
        if name in (b"identity", b"gzip", b"deflate") and weight > best_weight:
            best, best_weight = name, weight
    return best


def _weight(text: bytes) -> float:
    if not text:
        return 1.0
    name, _, number = text.partition(b"=")
    try:
        return float(number) if name.strip() == b"q" else 0.0
    except ValueError:
        return 0.0
