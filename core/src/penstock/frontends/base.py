"""What a frontend implements, and what it may use of the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from penstock.server import Server


class Frontend(ABC):
    """A protocol endpoint. One object per server, made before the event loop runs.

    ``name`` is the word in its flags (``--allow-<name>``). Everything here runs on the event loop.
    """

    name: ClassVar[str]

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    @abstractmethod
    def enabled(self) -> bool:
        """Whether ``server.options`` asks for this frontend."""

    @abstractmethod
    async def start(self) -> None:
        """Listen. Returns once requests are taken; raises `Unavailable` naming a busy port."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop accepting, answer what is in flight, close. The caller bounds the time."""
