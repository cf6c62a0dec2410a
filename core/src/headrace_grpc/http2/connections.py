"""The open connections of a host, their service, limits, sweep and shared buffer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace_grpc.http2.field_decoder import Fields
from headrace_grpc.http2.headers import RequestHeaders
from headrace_grpc.http2.lifetime import Keepalive
from headrace_grpc.http2.limits import SWEEP_SECONDS, Limits, Turns
from headrace_hosts.held_bytes import HeldBytes

if TYPE_CHECKING:
    from headrace_grpc.http2.connection import Connection
    from headrace_grpc.http2.stream import Stream

T = TypeVar("T")
_SCRATCH_BYTES = 64 * 1024
_UNLIMITED = 1 << 62
#: Interval of the checks while connections drain.
_DRAIN_CHECK_SECONDS = 0.1
#: Time for peers to read that their calls were ended.
_LAST_READ_SECONDS = 0.2


class Service(ABC, Generic[T]):
    """The protocol above HTTP/2: interprets request headers and makes the streams."""

    @abstractmethod
    def interpret(self, headers: RequestHeaders) -> T:
        """Return what ``headers`` ask for. The result is cached for the same headers on the same connection."""

    def extend(self, meaning: T, fields: Fields) -> T | None:
        """Return ``meaning`` with further regular ``fields``, or None: then `interpret` gets all headers together."""
        return None

    @abstractmethod
    def open(self, connection: Connection, id: int, meaning: T) -> Stream:
        """Return a stream for the request ``meaning``. It may already have answered."""

    def open_held(self, connection: Connection, id: int, meaning: T) -> Stream:
        """Like `open`, for a peer that does not read its answers: start the work by `ConnectionMemory.hold_back`."""
        return self.open(connection, id, meaning)

    def trim_memory(self) -> None:
        """Return memory to the system soon: a connection that held more than 1 MiB has closed."""


class Connections:
    """All connections of one port. Make it before listening; use it on the event loop only.

    ``scratch`` is one receive buffer for all connections: the loop fills and parses it in one step, so an idle
    connection needs no buffer. ``turns`` is the time budget of all connections. ``budget`` counts the bytes that they
    hold.
    """

    def __init__(
        self, service: Service[Any], limits: Limits, keepalive: Keepalive, budget: HeldBytes | None = None
    ) -> None:
        self.service = service
        self.limits = limits
        self.keepalive = keepalive
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.turns = Turns()
        self.budget = budget or HeldBytes(_UNLIMITED)
        self.held = HeldBytes(limits.held_bytes, self.budget) if limits.held_bytes else self.budget
        self._loop = asyncio.get_running_loop()
        self._interval = keepalive.interval(
            min(SWEEP_SECONDS, limits.head_seconds / 4, limits.unread_seconds / 4, limits.message_seconds / 4)
        )
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
        """Sweep all connections now and at a fixed interval, until `drain` ends."""
        now = self._loop.time()
        for connection in tuple(self._open):
            connection.lifetime.sweep(now)
        self._timer = self._loop.call_later(self._interval, self.watch)

    async def drain(self, seconds: float, reading_seconds: float = inf) -> None:
        """Wait until all connections have sent their answers and are closed, for ``seconds`` at most.

        Streams whose work has not begun end at once. A peer that only has to read its answers has
        ``reading_seconds``. Streams that are open after that, or when this call is cancelled, end by
        `Stream.terminate`.
        """
        for connection in tuple(self._open):
            connection.lifetime.shut_down()
            connection.lifetime.shut_down_streams()
        try:
            await self._emptied(seconds - _LAST_READ_SECONDS, reading_seconds)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for connection in tuple(self._open):
                connection.lifetime.terminate()
            await self._emptied(_LAST_READ_SECONDS, None)
            for connection in tuple(self._open):
                connection.abort()

    async def _emptied(self, seconds: float, reading_seconds: float | None) -> None:
        """Wait until no connection is open, for ``seconds`` at most; close those whose peers read too slowly."""
        loop = self._loop
        end = loop.time() + seconds
        while self._open and (left := end - loop.time()) > 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), min(left, _DRAIN_CHECK_SECONDS))
            if reading_seconds is not None:
                for connection in tuple(self._open):
                    connection.lifetime.end_if_unread(loop.time(), reading_seconds)
