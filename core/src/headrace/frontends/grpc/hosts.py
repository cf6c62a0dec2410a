"""What listens and speaks gRPC: one interface, two hosts, and the choice between them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.config.options import GrpcServer, ServerOptions
from headrace.distributions import need
from headrace.frontends.failures import is_verbose
from headrace.large import LargeWork

if TYPE_CHECKING:
    from headrace.frontends.grpc.rpcs import Rpc


_VERBOSITY = "GRPC_VERBOSITY"
#: What a call is told that the server has no more time for.
OUT_OF_TIME = "The server has stopped before the call was answered: its exit timeout is over."


class Host(ABC):
    """Serves ``rpcs`` on the address of ``options``. One object per start; everything on the event loop.

    ``large`` reads large messages and packs large answers.
    """

    def __init__(self, rpcs: Sequence[Rpc], options: ServerOptions, large: LargeWork) -> None:
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
    host = options.grpc_address
    return f"[{host}]:{options.grpc_port}" if ":" in host else f"{host}:{options.grpc_port}"


@contextmanager
def _quiet_core() -> Iterator[None]:
    """Import grpc so that its core writes nothing: it would write past our log, and whatever peers make it write.

    ``GRPC_VERBOSITY`` is read at that moment only. Whoever has set it, or wants a verbose log, gets what it says.
    """
    if _VERBOSITY in os.environ or is_verbose():
        yield
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        yield
    finally:
        del os.environ[_VERBOSITY]


def choose_host(wanted: GrpcServer) -> type[Host]:
    """The host for ``--grpc-server``; ``auto`` takes the native one.

    Imports what the host is made of, so call it on a thread. Raises `ConfigError` where that is not installed.
    """
    if wanted == "grpcio":
        need("grpc", "--grpc-server=grpcio")
        with _quiet_core():
            from headrace.frontends.grpc.grpcio_host import GrpcioHost

        return GrpcioHost
    from headrace.frontends.grpc.native_host import NativeHost

    return NativeHost
