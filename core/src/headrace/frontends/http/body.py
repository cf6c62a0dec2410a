"""Where the body of a request gathers while it arrives."""

from __future__ import annotations

import numpy as np

#: What engines like their tensors to start at; a cache line, and the width of AVX-512.
ALIGNMENT = 64
#: From here on a body of known length is received straight into its own memory.
DIRECT_BYTES = 64 * 1024


def aligned(size_bytes: int, json_bytes: int) -> memoryview:
    """Memory for a body whose tensors begin after ``json_bytes``, at an aligned address.

    The operating system gives the pages as they are written: announcing bytes costs nothing.
    """
    memory = np.empty(size_bytes + ALIGNMENT, np.uint8)
    offset = -(memory.ctypes.data + json_bytes) % ALIGNMENT
    return memory[offset : offset + size_bytes].data


class DirectBody:
    """A body of known length in one piece of memory, which the socket fills."""

    __slots__ = ("memory", "received_bytes")

    def __init__(self, size_bytes: int, json_bytes: int) -> None:
        self.memory = aligned(size_bytes, json_bytes)
        self.received_bytes = 0

    def append(self, data: bytes | bytearray) -> None:
        """Copy what came together with the head."""
        end = self.received_bytes + len(data)
        self.memory[self.received_bytes : end] = data
        self.received_bytes = end

    def tail(self) -> memoryview:
        """Where the next bytes belong."""
        return self.memory[self.received_bytes :]

    def advance(self, size_bytes: int) -> bool:
        """Note that ``size_bytes`` were written to `tail`; true once the body is complete."""
        self.received_bytes += size_bytes
        return self.received_bytes == self.memory.nbytes
