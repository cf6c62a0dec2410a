"""The streams of decoupled models. A server that stops ends them instead of waiting for their last response."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from headrace.errors import Unavailable

#: Ends a stream with an error. Event loop only.
EndStream: TypeAlias = "Callable[[Unavailable], None]"

ENDED = "Server is stopping, the stream has ended before its last response"


class OpenStreams:
    """The set of open streams. Event loop only."""

    def __init__(self) -> None:
        self._open: set[EndStream] = set()

    def add(self, end: EndStream) -> None:
        """Call ``end`` in `end_all`, unless it is discarded before."""
        self._open.add(end)

    def discard(self, end: EndStream) -> None:
        self._open.discard(end)

    def end_all(self) -> None:
        """End all open streams."""
        for end in tuple(self._open):
            end(Unavailable(ENDED))
