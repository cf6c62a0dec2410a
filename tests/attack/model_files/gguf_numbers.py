"""Finds the numbers of a GGUF file: its counts, and the sizes, types, values and places in its header.

Source: the specification of GGUF, version 3, in the repository of ggml.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeAlias

#: What the number is, its place, and its bytes.
Number: TypeAlias = tuple[str, int, int]
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def gguf_numbers(content: bytes) -> Iterator[Number]:
    """Yield the numbers of a file that is intact. Of an array of strings it is the size of the first one."""
    yield from (("version", 4, 4), ("count of tensors", 8, 8), ("count of members", 16, 8))
    tensors, members = struct.unpack_from("<QQ", content, 8)
    at = 24

    def string() -> str:
        nonlocal at
        (size,) = struct.unpack_from("<Q", content, at)
        at += 8 + size
        return content[at - size : at].decode()

    for _ in range(members):
        yield "size of a name", at, 8
        name = string()
        (kind,) = struct.unpack_from("<I", content, at)
        yield f"type of {name}", at, 4
        at += 4
        if kind == _ARRAY:
            kind, count = struct.unpack_from("<IQ", content, at)
            yield from ((f"type in {name}", at, 4), (f"count of {name}", at + 4, 8))
            at += 12
            yield f"first of {name}", at, 8 if kind == _STRING else _WIDTHS[kind]
            for _ in range(count):
                at += 8 + struct.unpack_from("<Q", content, at)[0] if kind == _STRING else _WIDTHS[kind]
        elif kind == _STRING:
            yield f"size of {name}", at, 8
            string()
        else:
            yield name, at, _WIDTHS[kind]
            at += _WIDTHS[kind]
    for _ in range(tensors):
        yield "size of a name", at, 8
        name = string()
        (axes,) = struct.unpack_from("<I", content, at)
        yield f"axes of {name}", at, 4
        yield from ((f"axis {axis} of {name}", at + 4 + 8 * axis, 8) for axis in range(axes))
        at += 4 + 8 * axes
        yield from ((f"type of {name}", at, 4), (f"place of {name}", at + 4, 8))
        at += 12
