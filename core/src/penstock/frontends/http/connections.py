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
#: This part of all connections makes room when there are too many.
_ROOM = 16


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
        self._is_draining = False

    def add(self, protocol: HttpProtocol) -> bool:
        """Whether there is room for ``protocol``; those that have been idle for longest give way."""
        self._open.add(protocol)
        self._empty.clear()
        return not 0 < self.limits.connections < len(self._open) or self._make_room()

    def remove(self, protocol: HttpProtocol) -> None:
        self._open.discard(protocol)
        if not self._open:
            self._empty.set()
        elif self._is_draining:
            self._end_idle()

    def call_soon(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def _make_room(self) -> bool:
        """Many at once, so that a flood of connections does not have them sorted for each."""
        idle = [protocol for protocol in self._open if protocol.is_idle and protocol.idle_seconds]
        idle.sort(key=lambda protocol: protocol.idle_seconds, reverse=True)
        for protocol in idle[: 1 + self.limits.connections // _ROOM]:
            protocol.close()
        return bool(idle)

    def _end_idle(self) -> None:
        """While any request is answered, others may still arrive on connections that were kept alive."""
        if all(protocol.is_idle for protocol in self._open):
            for protocol in tuple(self._open):
                protocol.close()

    def watch(self) -> None:
        """Sweep now and every `SWEEP_SECONDS`, until stopped."""
        for protocol in tuple(self._open):
            protocol.sweep()
        self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self.watch)

    async def drain(self) -> None:
        """Wait until each connection has had its answers and is closed; cancelled, close them all."""
        self._is_draining = True
        for protocol in tuple(self._open):
            protocol.stop()
        self._end_idle()
        try:
            await self._empty.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for protocol in tuple(self._open):
                protocol.abort()
