"""The groups for the key exchange that a ClientHello offers (RFC 8446 section 4.1.2).

The result is a hint for the choice of a context. OpenSSL reads the message itself, and refuses a malformed one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

#: Extensions: the groups that a client supports, and those that it has sent a key for.
_SUPPORTED_GROUPS, _KEY_SHARE = 10, 51
#: The header of the record and of the message, version and random.
_FIXED_BYTES = 5 + 4 + 2 + 32
_PAIR = struct.Struct(">HH")


def offered_groups(hello: bytes) -> Sequence[int]:
    """Return the numbers of the groups in the first record of ``hello``: those with a key, then all, the best first."""
    with_key: list[int] = []
    supported: tuple[int, ...] = ()
    try:
        place = _FIXED_BYTES + 1 + hello[_FIXED_BYTES]  # session id
        place += 2 + (hello[place] << 8) + hello[place + 1]  # cipher suites
        place += 1 + hello[place] + 2  # compression methods, length of the extensions
        while True:
            kind, size = _PAIR.unpack_from(hello, place)
            place += _PAIR.size
            if kind == _SUPPORTED_GROUPS:
                supported = struct.unpack_from(f">{size // 2 - 1}H", hello, place + 2)
            elif kind == _KEY_SHARE:
                each = place + 2
                while each < place + size:
                    group, key_bytes = _PAIR.unpack_from(hello, each)
                    with_key.append(group)
                    each += _PAIR.size + key_bytes
            place += size
    except (IndexError, struct.error):  # the end
        return (*with_key, *supported)
