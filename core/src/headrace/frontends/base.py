"""What a frontend implements, and what it may use of the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from headrace.server import Server


#: What a host that bounds its own stop waits beyond ``exit_timeout_secs``: only then do the models that are late
#: give their last answers, and the server cancels `Frontend.stop` soon after.
LAST_WORDS_S = 1


class Frontend(ABC):
    """A protocol endpoint. One object per server.

    ``name`` is the word in its flags (``--allow-<name>``). Everything here runs on the event loop.
    """

    name: ClassVar[str]

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    @abstractmethod
    def enabled(self) -> bool:
        """Whether ``server.options`` asks for this frontend."""

    @property
    def shares_port(self) -> bool:
        """Whether other processes listen on the same port, so that this one must not before it is ready."""
        return False

    @abstractmethod
    async def start(self) -> None:
        """Listen; raises `Unavailable` naming a busy port.

        This is before the models are loaded, unless the port is shared. Whatever asks the server for a
        model is refused until then, by the server.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Stop accepting, answer what is in flight, close. Cancelled, drop what is left.

        The caller bounds the time. A raise is logged.
        """
