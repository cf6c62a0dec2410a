"""The open connections of a host, and what they have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.frontends.http2.headers import RequestHeaders
from penstock.frontends.http2.keepalive import Keepalive
from penstock.frontends.http2.limits import SWEEP_SECONDS, Limits

if TYPE_CHECKING:
    from penstock.frontends.http2.connection import Connection
    from penstock.frontends.http2.stream import Stream

T = TypeVar("T")
_SCRATCH_BYTES = 64 * 1024


class Service(ABC, Generic[T]):
    """What is served: says what headers mean, and makes the streams."""

    @abstractmethod
    def interpret(self, headers: RequestHeaders) -> T:
        """What ``headers`` ask for. Kept, and used again for the same headers on the same connection."""

    @abstractmethod
    def open(self, connection: Connection, id: int, meaning: T) -> Stream:
        """The stream that ``meaning`` opens. May answer already."""


class Connections:
    """Made before listening; the event loop's.

    ``scratch`` is one receive buffer for all: the loop fills and parses it in one step, so that
    ten thousand idle connections hold no memory for it.
    """

    def __init__(self, service: Service[Any], limits: Limits, keepalive: Keepalive) -> None:
        self.service = service
        self.limits = limits
        self.keepalive = keepalive
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._loop = asyncio.get_running_loop()
        self._interval = keepalive.interval(SWEEP_SECONDS)
        self._open: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: Connection) -> None:
        self._open.add(connection)
        self._empty.clear()

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._empty.set()

    def watch(self) -> None:
        """Sweep now and from time to time, until `drain` has ended."""
        now = self._loop.time()
        for connection in tuple(self._open):
            connection.sweep(now)
        self._timer = self._loop.call_later(self._interval, self.watch)

    async def drain(self) -> None:
        """Wait until each connection has had its answers and is closed; cancelled, close them all."""
        for connection in tuple(self._open):
            connection.shut_down()
        try:
            await self._empty.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for connection in tuple(self._open):
                connection.abort()
