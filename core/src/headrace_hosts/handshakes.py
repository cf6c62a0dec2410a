"""Bounds on the TLS handshakes of a port: in number, in time, and per turn of the event loop.

A handshake takes 0.5 ms of the event loop (RSA with 2048 bits) or 0.2 ms (ECDSA). A client can start one by sending
300 recorded bytes. So all steps of handshakes wait in one queue, where the networks of clients take turns.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter

#: Connections of a port whose handshakes have not ended. One more closes the oldest one of the network that has most.
PENDING = 1024
#: The time for steps of handshakes in one turn of the event loop. The first step may take longer.
_TURN_S = 0.001
#: The part of the loop's time for peers that send little but framing.
_SLOW_SHARE = 0.25
_SWEEP_S = 0.5


@dataclass(frozen=True, slots=True)
class _Pending:
    """A connection whose handshake has not ended."""

    network: Hashable
    since_s: float
    abort: Callable[[], None]


class _Network:
    """The connections of one network of clients."""

    __slots__ = ("pending", "waiting")

    def __init__(self) -> None:
        #: The oldest first.
        self.pending: dict[Hashable, _Pending] = {}
        #: The next steps of the connections that wait for their turns. The longest wait is first.
        self.waiting: dict[Hashable, Callable[[], None]] = {}


class HandshakeQueue:
    """The connections of one port whose handshakes have not ended, and their turns. Event loop only.

    A handshake may take ``timeout_s`` from the connect on; 0 is no limit.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._pending: dict[Hashable, _Pending] = {}
        self._networks: dict[Hashable, _Network] = {}
        #: The networks with connections that wait, in the order of their turns.
        self._turns: dict[Hashable, None] = {}
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        #: When the next peer that sends little but framing may be read.
        self._slow_s = 0.0

    def add(self, connection: Hashable, address: str, abort: Callable[[], None]) -> None:
        """Count ``connection``, of a client at ``address``, until `remove`. Call ``abort`` to close it before that."""
        pending = self._pending[connection] = _Pending(_network(address), self._loop.time(), abort)
        self._networks.setdefault(pending.network, _Network()).pending[connection] = pending
        if len(self._pending) > PENDING:
            largest = max(self._networks.values(), key=lambda network: len(network.pending))
            self._abort(next(iter(largest.pending)))
        if self._timeout_s and self._timer is None:
            self._timer = self._loop.call_later(_SWEEP_S, self._sweep)

    def is_free(self) -> bool:
        """Return True for the first step in a turn of the loop, which need not `wait`."""
        if self._is_due:
            return False
        self._be_due()
        return True

    def wait(self, connection: Hashable, step: Callable[[], None]) -> None:
        """Call ``step`` when it is the turn of ``connection``, unless the connection is removed before."""
        pending = self._pending.get(connection)
        if pending is not None:
            self._networks[pending.network].waiting[connection] = step
            self._turns.setdefault(pending.network)
            self._be_due()

    def remove(self, connection: Hashable) -> None:
        """Stop counting ``connection``."""
        pending = self._pending.pop(connection, None)
        if pending is None:
            return
        network = self._networks[pending.network]
        del network.pending[connection]
        network.waiting.pop(connection, None)
        if not network.waiting:
            self._turns.pop(pending.network, None)
        if not network.pending:
            del self._networks[pending.network]

    def abort(self) -> None:
        """Close all connections."""
        for connection in tuple(self._pending):
            self._abort(connection)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def delay(self, cost_s: float, read: Callable[[], None]) -> None:
        """Call ``read``, of a peer that sends little but framing, so late that these peers keep within their share.

        ``cost_s`` is the time that the last read took.
        """
        self._slow_s = max(self._slow_s, self._loop.time()) + cost_s / _SLOW_SHARE
        self._loop.call_at(self._slow_s, read)

    def _be_due(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        """Do the next steps, of each network in turn: that of its connection with the longest wait."""
        self._is_due = False
        if not self._turns:
            return
        self._be_due()  # also if these are the last: no further step is free in this turn
        end = perf_counter() + _TURN_S
        while self._turns:
            key = next(iter(self._turns))
            network = self._networks[key]
            connection = next(iter(network.waiting))
            step = network.waiting.pop(connection)
            del self._turns[key]
            if network.waiting:
                self._turns[key] = None
            step()
            if perf_counter() > end:
                break

    def _sweep(self) -> None:
        """Close the connections whose handshakes take longer than ``timeout_s``."""
        self._timer = None
        latest_s = self._loop.time() - self._timeout_s
        for connection in [each for each, pending in self._pending.items() if pending.since_s < latest_s]:
            self._abort(connection)
        if self._pending:
            self._timer = self._loop.call_later(_SWEEP_S, self._sweep)

    def _abort(self, connection: Hashable) -> None:
        abort = self._pending[connection].abort
        self.remove(connection)
        abort()


def _network(address: str) -> Hashable:
    """Return the network of ``address``: the IPv4 address itself, or the first 64 bits of IPv6."""
    if ":" not in address or address.startswith("::ffff:"):
        return address
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8]
