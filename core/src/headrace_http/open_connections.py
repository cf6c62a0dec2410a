"""The open connections of one port: their number, their idle times, and their end."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic_ns
from typing import Protocol

from headrace.frontends.base import callers_s, streams_s
from headrace.off_loop import UNBOUNDED, OffLoopWork
from headrace_hosts.held_bytes import HeldBytes
from headrace_hosts.inflating import Take
from headrace_hosts.returned_memory import returned_memory
from headrace_http.caller_limits import SWEEP_SECONDS, HttpLimits
from headrace_http.message import Cancel, HttpReply, HttpRequest, Reply
from headrace_http.request_head import Refused, RequestHeadCache

log = logging.getLogger(__name__)

_BUFFER_BYTES = 64 * 1024
#: Connections with large bodies that read on in one turn of the event loop.
_PER_TURN = 16
#: Bytes of large bodies in one turn, if many arrive, and the longest time that they may take: memory that is new to the
#: process costs 0.3 to 8 ms per MiB, as fast as the system gives it.
_TURN_BYTES, _TURN_NS = 8 << 20, 10_000_000
#: The first check of a caller that has closed its sending side. If it has disconnected, a reset arrives a round trip
#: after the first write. Each further check waits twice as long.
_FIRST_CHECK_S = 0.01
#: If there are too many connections, 1/16 of them are closed.
_ROOM = 16
#: Streamed answers of routes get this time to report that the server stops.
_FAREWELL_S = 1.0


class OpenConnection(Protocol):
    """A connection of a host."""

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight or arriving."""

    @property
    def idle_seconds(self) -> int:
        """The approximate time for which it `is_idle`."""

    @property
    def has_left(self) -> bool:
        """True if a caller that has closed its sending side has closed the other side, too."""

    def stop(self) -> None:
        """Answer the requests that have arrived, and those that arrive completely meanwhile, then close."""

    def end_streams(self) -> None:
        """Close if a streamed answer has begun."""

    def close(self) -> None:
        """Close after everything written was sent."""

    def abort(self) -> None:
        """Close now."""

    def sweep(self) -> None:
        """Check the time limits. Called every `SWEEP_SECONDS`."""


class OpenConnections:
    """The connections of a port. Create it before listening. Event loop only."""

    def __init__(self, limits: HttpLimits, large: OffLoopWork) -> None:
        self.limits = limits
        self._large = large
        self._open: set[OpenConnection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False
        #: A caller that takes longer to read an answer is disconnected. Of an answer that is still being made, it must
        #: read something in this time.
        self.taking_s = inf

    def add(self, connection: OpenConnection) -> bool:
        """Add ``connection``. Return True if there is room; the connections that were idle longest are closed for
        it."""
        self._open.add(connection)
        self._empty.clear()
        return not 0 < self.limits.connections < len(self._open) or self._make_room()

    def remove(self, connection: OpenConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._empty.set()
        self.settle()

    def settle(self) -> None:
        """Close the idle connections of a server that stops, when no other is busy.

        Until then, further requests may arrive on them, and are answered.
        """
        if self._is_draining and all(connection.is_idle for connection in self._open):
            for connection in tuple(self._open):
                connection.close()

    def call_soon(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def give_up(self, connection: OpenConnection) -> None:
        """Abort ``connection``, whose caller does not read its answers, and return their memory to the system."""
        connection.abort()
        self.release_memory()

    def release_memory(self) -> None:
        """Return memory to the system soon, after a large object was dropped."""
        self._large.release_memory_later()

    def watch_for_reset(self, connection: OpenConnection, wait_s: float = _FIRST_CHECK_S) -> None:
        """Abort ``connection`` soon after its caller, which has closed its sending side, has disconnected.

        Its request must not run until the next sweep but one.
        """
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

    async def drain(self, exit_timeout_s: float, *, serves_on: bool) -> None:
        """Wait until each connection has its answers and is closed. If cancelled, close them all.

        With ``serves_on``, the connections are served as before for a short time, as in Triton. A request that has not
        arrived by then is refused, and an unread answer is dropped.
        """
        now, patience_s = asyncio.get_running_loop().time(), callers_s(exit_timeout_s)
        ends = now + exit_timeout_s
        try:
            if serves_on:
                await self._emptied(now + patience_s, ends)
            self._is_draining, self.taking_s = True, patience_s
            for connection in tuple(self._open):
                connection.stop()
            self.settle()
            await self._emptied(now + streams_s(exit_timeout_s) + _FAREWELL_S, ends)
            for connection in tuple(self._open):
                connection.end_streams()
            await self._emptied(inf, ends)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for connection in tuple(self._open):
                connection.abort()

    async def _emptied(self, until: float, ends: float) -> None:
        """Wait until there is no connection, or until the loop's time is ``until``. Log how many there are."""
        loop = asyncio.get_running_loop()
        while self._open and (left_s := until - loop.time()) > 0:
            log.info("Timeout %d: Found %d HTTP service connections", round(ends - loop.time()), len(self._open))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), min(left_s, 1.0))

    def _make_room(self) -> bool:
        """Close many at once, so that a flood of connections does not sort them for each one."""
        idle = [connection for connection in self._open if connection.is_idle and connection.idle_seconds]
        idle.sort(key=lambda connection: connection.idle_seconds, reverse=True)
        for connection in idle[: 1 + self.limits.connections // _ROOM]:
            connection.close()
        return bool(idle)


class NativeConnections(OpenConnections):
    """The connections of the native host.

    ``received`` is one receive buffer for all, and ``buffer`` a view of it. The loop fills and parses it in one step,
    so ten thousand idle connections need no memory for it. ``budget`` counts their bytes, in `held`: within it, or
    within the port's own limit, too.
    """

    def __init__(
        self,
        dispatch: Callable[[HttpRequest, Reply], Cancel | None],
        limits: HttpLimits,
        large: OffLoopWork,
        budget: HeldBytes | None = None,
        refusal: Callable[[Refused, HttpRequest], HttpReply] = lambda refused, request: refused.reply,
    ) -> None:
        super().__init__(limits, large)
        self.dispatch = dispatch
        #: Returns the answer to a request that is refused before `dispatch`. Its path is empty if the head is invalid.
        self.refusal = refusal
        self.budget = budget or HeldBytes(UNBOUNDED)
        self.held = HeldBytes(limits.held_bytes, self.budget) if limits.held_bytes else self.budget
        #: Returns memory for large bodies.
        self.take: Take = partial(returned_memory, is_short=self.budget.is_short)
        #: Bytes of large bodies that connections may receive in this turn of the loop, if there are many.
        self.turn_bytes = _TURN_BYTES
        self._turn_ends_ns = 0
        self._is_turn_begun = False
        self._late: deque[tuple[Callable[[], None], bool]] = deque()
        self.received = bytearray(_BUFFER_BYTES)
        self.buffer = memoryview(self.received)
        self.head_cache = RequestHeadCache()

    def spend(self, size_bytes: int) -> None:
        """Subtract received bytes from `turn_bytes`. None are left after `_TURN_NS`."""
        if not self._is_turn_begun:
            self._is_turn_begun, self._turn_ends_ns = True, monotonic_ns() + _TURN_NS
            self.call_soon(self._end_turn)
        self.turn_bytes = 0 if monotonic_ns() > self._turn_ends_ns else self.turn_bytes - size_bytes

    def _end_turn(self) -> None:
        self._is_turn_begun, self.turn_bytes = False, _TURN_BYTES

    def wait_turn(self, go_on: Callable[[], None], is_long: bool = False) -> None:
        """Call ``go_on``, which reads on, in a later turn of the event loop.

        In each turn, `_PER_TURN` connections read on, or one that ``is_long``: it allocates and copies.
        """
        self._late.append((go_on, is_long))
        if len(self._late) == 1:
            self.call_soon(self._serve)

    def _serve(self) -> None:
        late = self._late
        for _ in range(min(_PER_TURN, len(late))):
            go_on, is_long = late.popleft()
            go_on()
            if is_long:
                break
        if late:
            self.call_soon(self._serve)

    def use(self, dispatch: Callable[[HttpRequest, Reply], Cancel | None]) -> None:
        """Answer all further requests by ``dispatch``."""
        self.dispatch = dispatch
        for connection in self._open:
            connection.dispatch = dispatch  # type: ignore[attr-defined]  # each is an HttpProtocol
