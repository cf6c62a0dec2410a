"""One request on a connection and its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.frontends.http.message import Cancel, HttpReply

if TYPE_CHECKING:
    from headrace.frontends.http.protocol import HttpProtocol


class Exchange:
    """Holds the answer until those before it on the connection are written.

    It is itself the ``reply`` that the handler gets; a second reply is ignored.
    """

    __slots__ = ("_protocol", "cancel", "closes", "is_head", "reply")

    def __init__(self, protocol: HttpProtocol, closes: bool, is_head: bool) -> None:
        self.reply: HttpReply | None = None
        self.cancel: Cancel | None = None
        self.closes = closes
        self.is_head = is_head
        self._protocol = protocol

    @property
    def peer(self) -> str:
        """The address of the other end; empty where that is not known."""
        return self._protocol.peer

    def __call__(self, reply: HttpReply) -> None:
        if self.reply is None:
            self.reply = reply
            # It leads back here through the request, whose tensors would wait for the collector.
            self.cancel = None
            self._protocol.answered()
