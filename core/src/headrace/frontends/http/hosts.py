"""What accepts connections and speaks HTTP: one interface, two hosts, and the choice between them."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from headrace.distributions import need

if TYPE_CHECKING:
    from headrace.engine import Engine


class Host(ABC):
    """Serves ``listener``, which it owns once started, until stopped."""

    def __init__(self, engine: Engine, listener: socket.socket) -> None:
        self.engine = engine
        self.listener = listener

    @abstractmethod
    async def start(self) -> None:
        """Accept connections."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop accepting, answer what is in flight, close. Cancelled, drop what is left."""


def choose_host(wanted: str) -> type[Host]:
    """The host for ``--http-server``; ``auto`` takes the native one.

    Imports what the host is made of, so call it on a thread. Raises `ConfigError` where that is not installed.
    """
    if wanted == "hypercorn":
        need("hypercorn", "--http-server=hypercorn")
        from headrace.frontends.http.hypercorn_host import HypercornHost

        return HypercornHost
    from headrace.frontends.http.native_host import NativeHost

    return NativeHost
