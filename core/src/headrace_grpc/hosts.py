"""What listens and speaks gRPC: one interface, of which there are two hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from headrace.config.options import ServerOptions
from headrace.off_loop import OffLoopWork
from headrace_grpc.rpc import Rpc

#: What a call is told that the server has no more time for.
OUT_OF_TIME = "The server has stopped before the call was answered: its exit timeout is over."


class Host(ABC):
    """Serves ``rpcs`` on the address of ``options``. One object per start; everything on the event loop.

    ``large`` reads large messages and packs large answers.
    """

    def __init__(self, rpcs: Sequence[Rpc], options: ServerOptions, large: OffLoopWork) -> None:
        self.rpcs = rpcs
        self.options = options
        self.large = large

    @abstractmethod
    async def start(self) -> int:
        """Listen, and return the port.

        Raises `Unavailable` naming a busy address, and `ConfigError` for the TLS files.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Refuse new calls, end streams that ask for nothing, and answer what is in flight.

        What is not answered soon after ``exit_timeout_secs``, or when this is cancelled, ends with
        UNAVAILABLE and `OUT_OF_TIME`.
        """


def address_of(options: ServerOptions) -> str:
    """Where ``options`` say to listen, as messages name it."""
    return shown_address(options.grpc_address, options.grpc_port)


def shown_address(host: str, port: int) -> str:
    """An address and a port, as messages name them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
