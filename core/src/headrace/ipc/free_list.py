"""Which parts of an arena are taken: first fit, lowest address first, neighbours joined."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

#: Every block begins at a multiple of this and is that long: a cache line, and enough for any SIMD load.
ALIGNMENT: Final = 64


class FreeList:
    """Takes and gives back parts of ``size`` bytes. Not thread-safe.

    Taking the lowest address keeps the pages in use together at the beginning, where they are
    warm. Costs grow with the number of holes, about 30 ns each.
    """

    def __init__(self, size: int) -> None:
        self._taken: dict[int, int] = {}
        self._begins, self._sizes = [0], [size - size % ALIGNMENT]  # the holes, in order of address

    def take(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` that nobody else has; None if no hole is large enough.

        Raises `ValueError` for a negative number. No bytes take a place, too.
        """
        if nbytes < 0:
            raise ValueError(f"a block of {nbytes} bytes")
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        for index, size in enumerate(self._sizes):
            if size >= wanted:
                return self._cut(index, wanted)
        return None

    def give_back(self, offset: int) -> None:
        """Free the block at ``offset``. Raises `ValueError` if there is none."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise ValueError(f"no block begins at {offset}")
        begins, sizes = self._begins, self._sizes
        index = bisect_left(begins, offset)
        begins.insert(index, offset)
        sizes.insert(index, size)
        self._join(index)
        if index:
            self._join(index - 1)

    @property
    def is_empty(self) -> bool:
        return not self._taken

    def _cut(self, index: int, wanted: int) -> int:
        offset = self._begins[index]
        if self._sizes[index] == wanted:
            del self._begins[index], self._sizes[index]
        else:
            self._begins[index] += wanted
            self._sizes[index] -= wanted
        self._taken[offset] = wanted
        return offset

    def _join(self, index: int) -> None:
        """Make one hole of the one at ``index`` and the next, if they touch."""
        begins, sizes = self._begins, self._sizes
        if index + 1 < len(begins) and begins[index] + sizes[index] == begins[index + 1]:
            sizes[index] += sizes.pop(index + 1)
            del begins[index + 1]
