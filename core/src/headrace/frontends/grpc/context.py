"""What a handler may ask of the transport that called it, and what it answers with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

from headrace.errors import HeadraceError

#: Keys are in lower case and may repeat; values of keys that end in ``-bin`` are bytes.
Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

#: Sends one message of a stream; waits while the client does not read.
Send: TypeAlias = Callable[[bytes], Awaitable[None]]
#: Answers a call, once, on the event loop: a serialized message, or why there is none.
Reply: TypeAlias = Callable[["bytes | HeadraceError"], None]
#: Says that the caller has gone. Called at most once.
Cancel: TypeAlias = Callable[[], object]


class Context(Protocol):
    """One call. When the caller goes away or its deadline passes, the transport cancels the task
    that runs the handler, or calls what the handler returned."""

    @property
    def metadata(self) -> Metadata:
        """What the caller sent with the call."""

    @property
    def peer(self) -> str:
        """The address of the other end; empty where that is not known."""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """What the other end proved itself with, as ``ssl.SSLSocket.getpeercert`` has it; None without."""

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
