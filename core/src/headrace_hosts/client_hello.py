"""The groups for the key exchange that a ClientHello offers (RFC 8446 section 4.1.2).

A guess for the choice of a context, and no check: OpenSSL reads the message itself, and refuses it if it is malformed.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Extensions: the groups that a client supports, and those that it has sent a key for.
_SUPPORTED_GROUPS, _KEY_SHARE = 10, 51
#: The header of the record and of the message, version and random.
_FIXED_BYTES = 5 + 4 + 2 + 32


def offered_groups(hello: bytes) -> list[int]:
    """Return the numbers of the groups in the first record of ``hello``: those with a key, then all, the best first."""
    with_key: list[int] = []
    supported: list[int] = []
    for kind, content in _extensions(hello):
        if kind == _SUPPORTED_GROUPS:
            supported = [_number(content, place) for place in range(2, len(content) - 1, 2)]
        elif kind == _KEY_SHARE:
            place = 2
            while place + 4 <= len(content):
                with_key.append(_number(content, place))
                place += 4 + _number(content, place + 2)
    return with_key + supported


def _extensions(hello: bytes) -> Iterator[tuple[int, bytes]]:
    place = _FIXED_BYTES
    for length_bytes in (1, 2, 1):  # session id, cipher suites, compression methods
        place += length_bytes + int.from_bytes(hello[place : place + length_bytes], "big")
    place += 2
    while place + 4 <= len(hello):
        kind, size = _number(hello, place), _number(hello, place + 2)
        yield kind, hello[place + 4 : place + 4 + size]
        place += 4 + size


def _number(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 2], "big")
