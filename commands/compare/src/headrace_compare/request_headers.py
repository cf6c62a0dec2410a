"""Headers of a request: those of a recorded one, without headers of its connection or its encoding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: The request is sent on another connection, and its body is encoded again.
_NOT_SENT = frozenset(
    (
        *("connection", "content-encoding", "content-length", "content-type", "inference-header-content-length"),
        *("keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
    )
)
#: Headers of HTTP that gRPC sets itself.
_OF_GRPC = frozenset(("accept", "accept-encoding", "host", "user-agent"))
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_GRPC_NAME = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[ -~\t]*")


def checked_headers(headers: Any) -> dict[str, str]:
    """Return the ``headers`` that are sent. Raises `ValueError`, without a value: it may be a secret."""
    if not isinstance(headers, Mapping):
        raise ValueError("'headers' is no object of strings")
    for name, value in headers.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(f"{name!r} is no name of a header")
        if not (isinstance(value, str) and _VALUE.fullmatch(value)):
            raise ValueError(f"the value of the header '{name}' is no string of printable ASCII")
    return {name: value.strip() for name, value in headers.items() if name.lower() not in _NOT_SENT}


def as_metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return ``headers`` as metadata of gRPC, without those that gRPC sets or refuses."""
    named = ((name.lower(), value) for name, value in headers.items())
    return tuple(
        (name, value)
        for name, value in named
        if _GRPC_NAME.fullmatch(name) and name not in _OF_GRPC and not name.startswith("grpc-") and name[-4:] != "-bin"
    )
