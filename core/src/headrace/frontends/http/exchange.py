"""One request on a connection and its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.frontends.http.chunked_answer import ChunkedAnswer
from headrace.frontends.http.message import Cancel, HttpReply
from headrace.frontends.http.request_head import RequestHead

if TYPE_CHECKING:
    from headrace.frontends.http.protocol import HttpProtocol


class Exchange:
    """Holds the answer until those before it on the connection are written.

    It is itself the ``reply`` that the handler gets; a second reply is ignored.
    """

    __slots__ = ("_protocol", "cancel", "closes", "head", "reply")

    def __init__(self, protocol: HttpProtocol, closes: bool, head: RequestHead) -> None:
        self.reply: HttpReply | None = None
        self.cancel: Cancel | None = None
        self.closes = closes
        self.head = head
        self._protocol = protocol

    @property
    def is_head(self) -> bool:
        """Whether only the head of the answer is wanted."""
        return self.head.method == "HEAD"

    @property
    def peer(self) -> str:
        """The address of the other end; empty where that is not known."""
        return self._protocol.peer

    def stream(self, head: HttpReply) -> ChunkedAnswer:
        """Answer in pieces, instead."""
        return self._protocol.begin_stream(self, head)

    def __call__(self, reply: HttpReply) -> None:
        if self.reply is None:
            self.reply = reply
            # It leads back here through the request, whose tensors would wait for the collector.
            self.cancel = None
            self._protocol.answered()
