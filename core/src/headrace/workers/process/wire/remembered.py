"""What has been encoded or decoded before need not be again."""

from __future__ import annotations

from typing import Final, TypeVar

#: Different shapes and lists of names that are remembered.
_MOST: Final = 1024

Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(known: dict[Key, Value], key: Key, value: Value) -> None:
    """Clients choose shapes and names: what is remembered of them is bounded."""
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
