"""The interface of a frontend. It gets an engine, its only access to the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from headrace.engine import Engine


#: A host with a time limit of its own waits 1 s longer than ``exit_timeout_secs``: late models then give their last
#: answers, and the server cancels `Frontend.stop` soon after.
LAST_WORDS_S = 1
#: When the server stops, callers get at most 5 s to send the rest of a request, or to read a response.
_CALLERS_S = 5.0


def callers_s(exit_timeout_s: float) -> float:
    """Return the seconds of ``exit_timeout_s`` for slow callers, so that one of them cannot use up all the time."""
    return min(_CALLERS_S, exit_timeout_s / 4)


def streams_s(exit_timeout_s: float) -> float:
    """Return the seconds of ``exit_timeout_s`` after which open streams are ended: their clients need time to read."""
    return exit_timeout_s - callers_s(exit_timeout_s)


#: The protocols that have hosts: ``--http-server`` and ``--grpc-server`` choose one each.
HOSTED_PROTOCOLS = ("http", "grpc")


class Frontend(ABC):
    """A protocol endpoint. One object per server.

    ``name`` is the word in its flags (``--allow-<name>``). Everything here runs on the event loop.
    """

    name: ClassVar[str]
    #: ``http`` or ``grpc`` if this frontend is a host of that protocol. A server runs one host of each: the one that
    #: ``--http-server`` or ``--grpc-server`` names. Empty for a frontend with a protocol of its own.
    protocol: ClassVar[str] = ""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def check(cls) -> None:
        """Raise TypeError with the rule that the class breaks. Called once, when the plugin is found."""

    @property
    @abstractmethod
    def enabled(self) -> bool:
        """True if ``engine.options`` enable this frontend."""

    @property
    def shares_port(self) -> bool:
        """True if other processes listen on the same port. It then must not listen before it is ready."""
        return False

    @abstractmethod
    async def start(self) -> None:
        """Listen. Raises `Unavailable` with the port if that is in use.

        Called before the models are loaded, unless the port is shared. Until then, the server itself refuses requests
        for models.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Stop accepting, answer the requests in flight, and close. If cancelled, drop the rest.

        The caller limits the time. An exception is logged.
        """
