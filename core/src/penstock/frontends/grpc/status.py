"""The one table from an error's `Code` to a gRPC status (behaviours.md section 0)."""

from __future__ import annotations

from grpc import StatusCode

from penstock.errors import Code

STATUS = {
    Code.UNKNOWN: StatusCode.UNKNOWN,
    Code.INTERNAL: StatusCode.INTERNAL,
    Code.NOT_FOUND: StatusCode.NOT_FOUND,
    Code.INVALID_ARGUMENT: StatusCode.INVALID_ARGUMENT,
    Code.UNAVAILABLE: StatusCode.UNAVAILABLE,
    Code.UNSUPPORTED: StatusCode.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: StatusCode.ALREADY_EXISTS,
    Code.CANCELLED: StatusCode.CANCELLED,
}

#: Details travel in the trailers, of which clients take 8 KiB in all, percent-encoded.
_DETAILS_BYTES = 6144
#: No text of this many characters can need more, at four bytes each and three per byte encoded.
_ALWAYS_FITS = _DETAILS_BYTES // 12


def details(message: str) -> str:
    """``message`` as status details: cut where a client would refuse the trailers for their size."""
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
