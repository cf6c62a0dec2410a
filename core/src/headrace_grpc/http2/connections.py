"""The open connections of a host, and what they have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.frontends.held_bytes import HeldBytes
from headrace_grpc.http2.field_decoder import Fields
from headrace_grpc.http2.headers import RequestHeaders
from headrace_grpc.http2.lifetime import Keepalive
from headrace_grpc.http2.limits import SWEEP_SECONDS, Limits, Turns

if TYPE_CHECKING:
    from headrace_grpc.http2.connection import Connection
    from headrace_grpc.http2.stream import Stream

T = TypeVar("T")
_SCRATCH_BYTES = 64 * 1024
#: Between two looks at what holds up the end.
_LOOK_SECONDS = 0.1
#: For peers to read that their calls were ended.
_LAST_WORDS_SECONDS = 0.2


class Service(ABC, Generic[T]):
    """What is served: says what headers mean, and makes the streams."""

    @abstractmethod
    def interpret(self, headers: RequestHeaders) -> T:
        """What ``headers`` ask for. Kept, and used again for the same headers on the same connection."""

    def extend(self, meaning: T, fields: Fields) -> T | None:
        """``meaning`` with further ``fields``, no pseudo-headers; None: interpret them all together."""
        return None

    @abstractmethod
    def open(self, connection: Connection, id: int, meaning: T) -> Stream:
        """The stream that ``meaning`` opens. May answer already."""

    def open_held(self, connection: Connection, id: int, meaning: T) -> Stream:
        """The same for a peer that does not read its answers: let the work wait (`PeerHoldings.hold_back`)."""
        return self.open(connection, id, meaning)

    def give_back(self) -> None:
        """Much was let go: return the memory to the system soon."""


class Connections:
    """Made before listening; the event loop's.

    ``scratch`` is one receive buffer for all: the loop fills and parses it in one step, so that
    ten thousand idle connections hold no memory for it. ``turns`` shares out the loop's time.
    """

    def __init__(self, service: Service[Any], limits: Limits, keepalive: Keepalive) -> None:
        self.service = service
        self.limits = limits
        self.keepalive = keepalive
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.turns = Turns()
        self.held = HeldBytes(limits.held_bytes)
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
        """Sweep now and from time to time, until `drain` has ended."""
        now = self._loop.time()
        for connection in tuple(self._open):
            connection.lifetime.sweep(now)
        self._timer = self._loop.call_later(self._interval, self.watch)

    async def drain(self, seconds: float, reading_seconds: float = inf) -> None:
        """Wait until each connection has had its answers and is closed, for ``seconds`` at most.

        A peer that only has to read its answers has ``reading_seconds`` for it. Streams that nobody works for are
        ended at once, those that are left at the end, or when this is cancelled, by `Stream.expel`.
        """
        for connection in tuple(self._open):
            connection.lifetime.shut_down()
            connection.lifetime.farewell()
        try:
            await self._emptied(seconds - _LAST_WORDS_SECONDS, reading_seconds)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for connection in tuple(self._open):
                connection.lifetime.expel()
            await self._emptied(_LAST_WORDS_SECONDS, None)
            for connection in tuple(self._open):
                connection.abort()

    async def _emptied(self, seconds: float, reading_seconds: float | None) -> None:
        """Wait until there is no connection, for ``seconds`` at most, and hurry those that only read."""
        loop = self._loop
        end = loop.time() + seconds
        while self._open and (left := end - loop.time()) > 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), min(left, _LOOK_SECONDS))
            if reading_seconds is not None:
                for connection in tuple(self._open):
                    connection.lifetime.hurry(loop.time(), reading_seconds)
