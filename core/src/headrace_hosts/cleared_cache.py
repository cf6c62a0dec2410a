"""A cache of what was computed for keys that callers choose, such as heads, header fields, routes and messages."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ClearedCache(dict[K, V]):
    """A dictionary of at most ``most`` entries. When it is full, `keep` clears it before it adds the next one.

    So a caller that sends a new key each time costs little, and the entries of others are soon back.
    """

    __slots__ = ("_most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: K, value: V) -> None:
        if len(self) >= self._most:
            self.clear()
        self[key] = value
