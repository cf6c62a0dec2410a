"""The open connections of one port: how many, for how long, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from headrace.frontends.held_bytes import HeldBytes
from headrace.frontends.http.caller_limits import SWEEP_SECONDS, HttpLimits
from headrace.frontends.http.message import Cancel, HttpRequest, Reply
from headrace.frontends.http.request_head import RequestHeadCache
from headrace.large import LargeWork

_BUFFER_BYTES = 64 * 1024
#: How soon a caller who has closed its side is looked at for the first time. A reset, which says that it has gone
#: altogether, comes a round trip after what was written; each look waits twice as long as the one before.
_FIRST_LOOK_S = 0.01
#: This part of all connections makes room when there are too many.
_ROOM = 16


class OpenConnection(Protocol):
    """What a host's connections can do."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight and nothing is arriving."""

    @property
    def idle_seconds(self) -> int:
        """For how long it `is_idle`, about."""

    @property
    def has_left(self) -> bool:
        """Whether a caller who has closed its side turned out to have closed the other side, too."""

    def stop(self) -> None:
        """Answer what has arrived, is arriving, or still arrives while others are answered, and close behind it."""

    def close(self) -> None:
        """Close, once what was written has been sent."""

    def abort(self) -> None:
        """Close now."""

    def sweep(self) -> None:
        """Called every `SWEEP_SECONDS`: give up a caller whose time is over."""


class OpenConnections:
    """Made before listening; the event loop's."""

    def __init__(self, limits: HttpLimits, large: LargeWork) -> None:
        self.limits = limits
        self._large = large
        self._open: set[OpenConnection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False

    def add(self, connection: OpenConnection) -> bool:
        """Whether there is room for ``connection``; those that have been idle for longest give way."""
        self._open.add(connection)
        self._empty.clear()
        return not 0 < self.limits.connections < len(self._open) or self._make_room()

    def remove(self, connection: OpenConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._empty.set()
        self.settle()

    def settle(self) -> None:
        """End the idle connections of a server that stops, once no other is busy.

        Until then, more requests may arrive on them, and are answered.
        """
        if self._is_draining and all(connection.is_idle for connection in self._open):
            for connection in tuple(self._open):
                connection.close()

    def call_soon(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def give_up(self, connection: OpenConnection) -> None:
        """Abort ``connection``, whose caller does not take its answers. What they took goes back to the system."""
        connection.abort()
        self.give_back()

    def give_back(self) -> None:
        """Something large was thrown away: return its memory to the system soon."""
        self._large.give_back_later()

    def watch_for_reset(self, connection: OpenConnection, wait_s: float = _FIRST_LOOK_S) -> None:
        """Abort ``connection`` soon after its caller, who has closed its side, turns out to have gone: what it asked is
        not to run on until the next sweep but one."""
        if connection.has_left:
            connection.abort()
        elif wait_s < SWEEP_SECONDS and not connection.is_idle:
            self.call_later(wait_s, partial(self.watch_for_reset, connection, 2 * wait_s))

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(delay_s, callback)

    def watch(self) -> None:
        """Sweep now and every `SWEEP_SECONDS`, until stopped."""
        for connection in tuple(self._open):
            connection.sweep()
        self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self.watch)

    async def drain(self) -> None:
        """Wait until each connection has had its answers and is closed; cancelled, close them all."""
        self._is_draining = True
        for connection in tuple(self._open):
            connection.stop()
        self.settle()
        try:
            await self._empty.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for connection in tuple(self._open):
                connection.abort()

    def _make_room(self) -> bool:
        """Many at once, so that a flood of connections does not have them sorted for each."""
        idle = [connection for connection in self._open if connection.is_idle and connection.idle_seconds]
        idle.sort(key=lambda connection: connection.idle_seconds, reverse=True)
        for connection in idle[: 1 + self.limits.connections // _ROOM]:
            connection.close()
        return bool(idle)


class NativeConnections(OpenConnections):
    """Those of the native host.

    ``received`` is one receive buffer for all, and ``buffer`` a view of it: the loop fills and
    parses it in one step, so that ten thousand idle connections hold no memory for it.
    """

    def __init__(
        self, dispatch: Callable[[HttpRequest, Reply], Cancel | None], limits: HttpLimits, large: LargeWork
    ) -> None:
        super().__init__(limits, large)
        self.dispatch = dispatch
        self.held = HeldBytes(limits.held_bytes)
        self.received = bytearray(_BUFFER_BYTES)
        self.buffer = memoryview(self.received)
        self.head_cache = RequestHeadCache()
