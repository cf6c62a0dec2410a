"""The open connections of the native HTTP host, and what they have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.frontends.http.heads import KnownHeads
from penstock.frontends.http.limits import SWEEP_SECONDS, Limits
from penstock.frontends.http.message import Cancel, HttpRequest, Reply

if TYPE_CHECKING:
    from penstock.frontends.http.protocol import HttpProtocol

_SCRATCH_BYTES = 64 * 1024


class Connections:
    """Made before listening; the event loop's.

    ``received`` is one receive buffer for all, and ``scratch`` a view of it: the loop fills and
    parses it in one step, so that ten thousand idle connections hold no memory for it.
    """

    def __init__(self, dispatch: Callable[[HttpRequest, Reply], Cancel | None], limits: Limits) -> None:
        self.dispatch = dispatch
        self.limits = limits
        self.received = bytearray(_SCRATCH_BYTES)
        self.scratch = memoryview(self.received)
        self.known_heads = KnownHeads()
        self._open: set[HttpProtocol] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, protocol: HttpProtocol) -> None:
        self._open.add(protocol)
        self._empty.clear()

    def remove(self, protocol: HttpProtocol) -> None:
        self._open.discard(protocol)
        if not self._open:
            self._empty.set()

    def watch(self) -> None:
        """Sweep now and every `SWEEP_SECONDS`, until stopped."""
        for protocol in tuple(self._open):
            protocol.sweep()
        self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self.watch)

    async def drain(self) -> None:
        """Wait until each connection has had its answers and is closed; cancelled, close them all."""
        for protocol in tuple(self._open):
            protocol.stop()
        try:
            await self._empty.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for protocol in tuple(self._open):
                protocol.abort()
