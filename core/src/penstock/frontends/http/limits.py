"""How much a caller may send before the server says no.

Only ``input_bytes`` is an option (``--http-max-input-size``); the rest are far from anything a
client of Triton sends. Sources: behaviours.md sections 1.1, 1.3 and 14; security.md C11, C15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import InvalidArgument
from penstock.frontends.http.compression import too_large
from penstock.frontends.http.decode import json_too_large, raw_too_large
from penstock.frontends.http.message import HEADER_LENGTH

#: What Triton's parser of ``Content-Length`` can hold, and so the largest body of all.
MAX_BODY_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one connection; the seconds are checked every `SWEEP_SECONDS`."""

    input_bytes: int = 64 * 1024 * 1024
    head_bytes: int = 64 * 1024
    headers: int = 128
    chunks: int = 65536
    #: Requests of one connection that may be unanswered before it is no longer read.
    in_flight: int = 64
    #: Without a byte for so long, an unfinished request is given up.
    quiet_sweeps: int = 3
    #: Sweeps that a head may take altogether, drip by drip.
    head_sweeps: int = 6
    #: Sweeps that a refused caller is still listened to, so that it reads the refusal.
    linger_sweeps: int = 3

    def body_limit(self, path: str, headers: Mapping[bytes, bytes]) -> int:
        """The most body bytes that this request may have.

        The binary tensors of an infer request are bounded by `MAX_BODY_BYTES` only.
        """
        has_tensors = headers.get(HEADER_LENGTH, b"0") != b"0" and path.endswith("/infer")
        return MAX_BODY_BYTES if has_tensors and not is_compressed(headers) else self.input_bytes

    def body_refusal(self, size_bytes: int, headers: Mapping[bytes, bytes]) -> InvalidArgument:
        """Why a body of ``size_bytes`` is refused."""
        if size_bytes > MAX_BODY_BYTES:
            return InvalidArgument(
                f"Unable to parse Content-Length, value is out of range [ -2147483648, 2147483647 ], got: {size_bytes}"
            )
        if is_compressed(headers):
            return too_large(self.input_bytes)
        if headers.get(HEADER_LENGTH) == b"0":
            return raw_too_large(size_bytes, self.input_bytes)
        return json_too_large(size_bytes, self.input_bytes)


#: How often the host looks for connections that have gone quiet.
SWEEP_SECONDS = 10.0


def is_compressed(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-encoding", b"identity") not in (b"", b"identity")


def too_many_chunks(limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"Chunked request body exceeds maximum of {limit} non-empty chunks. Send fewer or larger HTTP chunks."
    )
