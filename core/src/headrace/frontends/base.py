"""What a frontend implements, and what it is given: the engine, which is all that it sees of the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from headrace.engine import Engine


#: What a host that bounds its own stop waits beyond ``exit_timeout_secs``: only then do the models that are late
#: give their last answers, and the server cancels `Frontend.stop` soon after.
LAST_WORDS_S = 1
#: What callers have at most to send the rest of a request, or to read an answer, once the server stops.
_CALLERS_S = 5.0


def callers_s(exit_timeout_s: float) -> float:
    """Return how many seconds of ``exit_timeout_s`` callers may use up: one that drips does not decide the rest."""
    return min(_CALLERS_S, exit_timeout_s / 4)


def streams_s(exit_timeout_s: float) -> float:
    """Return after how many seconds of ``exit_timeout_s`` streams are told that the server stops, and end."""
    return exit_timeout_s / 2


class Frontend(ABC):
    """A protocol endpoint. One object per server.

    ``name`` is the word in its flags (``--allow-<name>``). Everything here runs on the event loop.
    """

    name: ClassVar[str]

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    @abstractmethod
    def enabled(self) -> bool:
        """Whether ``engine.options`` asks for this frontend."""

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
