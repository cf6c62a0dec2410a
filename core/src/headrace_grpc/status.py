"""The table from an error's `Code` to a gRPC status (docs/spec/behaviours.md section 0)."""

from __future__ import annotations

from math import ceil

from headrace.errors import Code, HeadraceError, OutOfMemory
from headrace.frontends.failures import without_paths

#: gRPC's numbers (https://grpc.github.io/grpc/core/md_doc_statuscodes.html) that a transport needs.
OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS = 0, 1, 2, 3, 4, 5, 6
PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 7, 8, 12, 13, 14, 16

STATUS = {
    Code.UNKNOWN: UNKNOWN,
    Code.INTERNAL: INTERNAL,
    Code.NOT_FOUND: NOT_FOUND,
    Code.INVALID_ARGUMENT: INVALID_ARGUMENT,
    Code.UNAVAILABLE: UNAVAILABLE,
    Code.UNSUPPORTED: UNIMPLEMENTED,
    Code.ALREADY_EXISTS: ALREADY_EXISTS,
    Code.CANCELLED: CANCELLED,
    Code.UNAUTHENTICATED: UNAUTHENTICATED,
    Code.PERMISSION_DENIED: PERMISSION_DENIED,
    Code.RESOURCE_EXHAUSTED: RESOURCE_EXHAUSTED,
}


def status_of(error: HeadraceError) -> int:
    """Return the status of ``error``."""
    return RESOURCE_EXHAUSTED if isinstance(error, OutOfMemory) else STATUS[error.code]


#: The name of the trailer that says when to try again, in ms. Clients that retry by themselves read it.
#: Source: https://github.com/grpc/proposal/blob/master/A6-client-retries.md#pushback.
PUSHBACK = "grpc-retry-pushback-ms"
#: Clients read it as a 32-bit number.
_LONGEST_MS = (1 << 31) - 1


def pushback_ms(error: HeadraceError) -> int | None:
    """Return the value of the trailer `PUSHBACK` for ``error``; None if it does not say when to try again."""
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    return None if retry_after_s is None else ceil(min(max(0.0, retry_after_s * 1e3), _LONGEST_MS))


class Status(Exception):
    """Ends a call with a status of the transport, which no `HeadraceError` has."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


#: Details are sent percent-encoded in the trailers. Clients accept 8 KiB of trailers.
_DETAILS_BYTES = 6144
#: A text of this many characters always fits: at most four bytes each, and three per encoded byte.
_ALWAYS_FITS = _DETAILS_BYTES // 12


def details(message: str) -> str:
    """Return ``message`` as status details: without paths, and short enough for the trailers."""
    message = without_paths(message)
    if len(message) > _ALWAYS_FITS:
        message = _cut(message)
    return message.encode("utf-8", "replace").decode()


def _cut(message: str) -> str:
    room = _DETAILS_BYTES
    for position, character in enumerate(message):
        plain = " " <= character <= "~" and character != "%"
        room -= 1 if plain else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return message[:position] + "..."
    return message
