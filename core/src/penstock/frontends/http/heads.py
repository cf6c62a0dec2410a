"""Heads that have been read before.

Clients repeat themselves: before the body of a request come, as a rule, the very bytes that came
before the last one. What the parser made of them is kept, and they are not parsed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.frontends.http.body import DIRECT_BYTES

#: Where a head ends.
END = b"\r\n\r\n"
#: Heads that are kept, and the bytes that one may have.
_HEADS = 256
_HEAD_BYTES = 1024
#: Headers of requests that are more than a head and a body of known length.
_UNUSUAL = frozenset((b"transfer-encoding", b"expect", b"upgrade"))


class Head(NamedTuple):
    """A request up to its body. ``headers`` are those of `HttpRequest`; nobody changes them.

    ``closes`` says that the connection ends with the answer.
    """

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    raw_headers: Sequence[tuple[bytes, bytes]]
    body_bytes: int = 0
    closes: bool = False


class KnownHeads:
    """Heads by their bytes, for all connections: equal bytes mean the same wherever they come from.

    When it is full it starts anew, so that callers who never repeat themselves cost little.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}
        #: The head that these bytes are, or None; one look-up.
        self.find = self._known.get

    def keep(self, received: memoryview, head: Head) -> None:
        """Know ``head`` from now on, if ``received`` begins with it and it is short and usual."""
        if head.closes or head.body_bytes > DIRECT_BYTES or not _UNUSUAL.isdisjoint(head.headers):
            return
        raw, end, _ = bytes(received[:_HEAD_BYTES]).partition(END)
        if not end or not raw.startswith(head.method.encode()):
            return  # of empty lines in front, which mean nothing, the first two would look like an end
        if len(self._known) >= _HEADS:
            self._known.clear()
        self._known[raw + end] = head
