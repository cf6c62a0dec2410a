"""The interface of a gRPC host. There are two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from headrace.config.options import ServerOptions
from headrace.off_loop import OffLoopWork
from headrace_grpc.rpc import Rpc

#: The text for calls that the server has no more time to answer.
OUT_OF_TIME = "The server has stopped before the call was answered: its exit timeout is over."


class Host(ABC):
    """Serves ``rpcs`` on the address of ``options``. One object per start. Event loop only.

    ``large`` parses large messages and compresses large answers.
    """

    def __init__(self, rpcs: Sequence[Rpc], options: ServerOptions, large: OffLoopWork) -> None:
        self.rpcs = rpcs
        self.options = options
        self.large = large

    @abstractmethod
    async def start(self) -> int:
        """Listen, and return the port.

        Raises `Unavailable` with a busy address, and `ConfigError` for the TLS files.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Refuse new calls, end idle streams, and answer the requests in flight.

        Calls that are unanswered soon after ``exit_timeout_secs``, or when this is cancelled, end with UNAVAILABLE and
        `OUT_OF_TIME`.
        """


def address_of(options: ServerOptions) -> str:
    """Return the address of ``options``, for messages."""
    return shown_address(options.grpc_address, options.grpc_port)


def shown_address(host: str, port: int) -> str:
    """Return an address and a port, for messages."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
