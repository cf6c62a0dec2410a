"""What a handler may ask of the transport that called it."""

from __future__ import annotations

from typing import Protocol, TypeAlias

#: Keys are in lower case and may repeat; values of keys that end in ``-bin`` are bytes.
Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"


class Context(Protocol):
    """One call. When the caller goes away or its deadline passes, the transport cancels the task
    that runs the handler."""

    @property
    def metadata(self) -> Metadata:
        """What the caller sent with the call."""

    @property
    def draining(self) -> bool:
        """Whether the server is about to stop and takes no new requests."""


def first(metadata: Metadata, key: str) -> str | None:
    """The first text under ``key``, or None."""
    for name, value in metadata:
        if name == key and isinstance(value, str):
            return value
    return None


def texts(metadata: Metadata) -> list[tuple[str, str]]:
    """The entries that are text."""
    return [(name, value) for name, value in metadata if isinstance(value, str)]
