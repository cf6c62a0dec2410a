"""What listens and speaks gRPC: one interface, two hosts, and the choice between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.config.options import GrpcServer, ServerOptions

if TYPE_CHECKING:
    from penstock.frontends.grpc.rpcs import Rpc


class Host(ABC):
    """Serves ``rpcs`` on the address of ``options``. One object per start; everything on the event loop."""

    def __init__(self, rpcs: Sequence[Rpc], options: ServerOptions) -> None:
        self.rpcs = rpcs
        self.options = options

    @abstractmethod
    async def start(self) -> int:
        """Listen, and return the port.

        Raises `Unavailable` naming a busy address, and `ConfigError` for the TLS files.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Refuse new calls, answer those in flight, then abort what is left, soon after ``exit_timeout_secs``.

        Cancelled, abort at once.
        """


def address_of(options: ServerOptions) -> str:
    """Where ``options`` say to listen, as messages name it."""
    host = options.grpc_address
    return f"[{host}]:{options.grpc_port}" if ":" in host else f"{host}:{options.grpc_port}"


def choose_host(wanted: GrpcServer) -> type[Host]:
    """The host for ``--grpc-server``; ``auto`` takes the native one.

    Imports what the host is made of, so call it on a thread.
    """
    if wanted == "grpcio":
        from penstock.frontends.grpc.grpcio_host import GrpcioHost

        return GrpcioHost
    from penstock.frontends.grpc.native_host import NativeHost

    return NativeHost
