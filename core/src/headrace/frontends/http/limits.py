"""How much a caller may send, and how long it may take, before the server says no.

Flags set ``input_bytes`` (``--http-max-input-size``), ``connections`` and what is said in seconds; the rest are far
from anything a client of Triton sends. Sources: docs/spec/behaviours.md sections 1.1, 1.3 and 14;
docs/spec/security.md C11, C15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.config.options import ServerOptions
from headrace.errors import InvalidArgument
from headrace.frontends.http.compression import too_large
from headrace.frontends.http.decode import json_too_large, raw_too_large
from headrace.frontends.http.message import HEADER_LENGTH

#: What Triton's parser of ``Content-Length`` can hold, and so the largest body of all.
MAX_BODY_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one connection; what is said in seconds is looked at every `SWEEP_SECONDS`, and 0 is for ever."""

    input_bytes: int = 64 * 1024 * 1024
    #: Of a head, and of the trailers or of the chunk extensions of a body.
    head_bytes: int = 64 * 1024
    headers: int = 128
    chunks: int = 65536
    #: Requests of one connection that may be unanswered before it is no longer read.
    in_flight: int = 64
    #: Connections of one port.
    connections: int = 4096
    #: From its first byte, or from the beginning of the connection, to the end of a head.
    header_timeout_s: int = 60
    #: Between two requests.
    keepalive_timeout_s: int = 620
    #: What a body must arrive with, and an answer be taken with, in bytes a second (`Pace`).
    min_data_rate: int = 1024
    #: Without which progress they are given up after so long.
    stall_timeout_s: int = 30
    #: How long a refused caller is still listened to, so that it reads the refusal.
    linger_s: int = 30

    def body_limit(self, path: str, headers: Mapping[bytes, bytes]) -> int:
        """The most body bytes that this request may have.

        The binary tensors of an infer request are bounded by `MAX_BODY_BYTES` only.
        """
        has_tensors = headers.get(HEADER_LENGTH, b"0") != b"0" and path.endswith("/infer")
        return MAX_BODY_BYTES if has_tensors and not is_compressed(headers) else self.input_bytes

    def body_refusal(self, size_bytes: int, path: str, headers: Mapping[bytes, bytes]) -> InvalidArgument:
        """Why a body of ``size_bytes`` is refused. As in Triton, only inference reads the number as one of 32 bits."""
        if size_bytes > MAX_BODY_BYTES and path.endswith("/infer"):
            return InvalidArgument(
                f"Unable to parse Content-Length, value is out of range [ -2147483648, 2147483647 ], got: {size_bytes}"
            )
        if is_compressed(headers):
            return too_large(self.input_bytes)
        if headers.get(HEADER_LENGTH) == b"0":
            return raw_too_large(size_bytes, self.input_bytes)
        return json_too_large(size_bytes, self.input_bytes)


def flagged(options: ServerOptions) -> dict[str, int]:
    """The fields of `Limits` that flags set for every port."""
    return {
        "connections": options.http_max_connections,
        "header_timeout_s": options.http_header_timeout_secs,
        "keepalive_timeout_s": options.http_keepalive_timeout_secs,
        "min_data_rate": options.http_min_data_rate,
        "stall_timeout_s": options.http_stall_timeout_secs,
    }


#: How often the host looks for connections whose time is over.
SWEEP_SECONDS = 1.0


def is_compressed(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-encoding", b"identity") not in (b"", b"identity")


def too_many_chunks(limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"Chunked request body exceeds maximum of {limit} non-empty chunks. Send fewer or larger HTTP chunks."
    )
