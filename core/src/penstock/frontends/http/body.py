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

    __slots__ = ("_received", "memory")

    def __init__(self, size_bytes: int, json_bytes: int) -> None:
        self.memory = aligned(size_bytes, json_bytes)
        self._received = 0

    def append(self, data: bytes) -> None:
        """Copy what came together with the head."""
        end = self._received + len(data)
        self.memory[self._received : end] = data
        self._received = end

    def tail(self) -> memoryview:
        """Where the next bytes belong."""
        return self.memory[self._received :]

    def advance(self, size_bytes: int) -> bool:
        """Note that ``size_bytes`` were written to `tail`; true once the body is complete."""
        self._received += size_bytes
        return self._received == self.memory.nbytes
