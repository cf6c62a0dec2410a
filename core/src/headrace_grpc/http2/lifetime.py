"""When a connection ends: keepalive pings in both directions, age, peers that do not go on, and shutdown.

Source: docs/spec/behaviours.md section 2.6, and gRPC's core: https://github.com/grpc/grpc/blob/master/doc/keepalive.md.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from headrace_grpc.http2 import frames
from headrace_grpc.http2.frames import ENHANCE_YOUR_CALM, LAST_ID, NO_ERROR, ConnectionFault
from headrace_hosts.held_bytes import SLOW_S

if TYPE_CHECKING:
    from headrace_grpc.http2.connection import Connection

#: Shortest time between pings of a peer that has no calls, if pings without calls are not permitted.
_IDLE_INTERVAL = 7200.0
#: Payloads of our pings: eight bytes each, so that the answers can be distinguished.
_GRACE_PING, _KEEPALIVE_PING = b"shutdown", b"keepaliv"
#: Time for the answer to the first ping: a disconnected peer must not delay the shutdown.
_GRACE_SECONDS = 0.5
#: When the server stops and all answers are made: the longest time in which a peer reads nothing.
_UNREAD_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The keepalive settings. Times are in seconds; `inf` is never."""

    time: float = 7200.0
    timeout: float = 20.0
    without_calls: bool = False
    #: Most pings that we send between two answers; 0 is no limit.
    pings_without_data: int = 2
    #: Shortest time between pings of the peer, between two answers. ``strikes`` violations are allowed; 0 allows all.
    peer_interval: float = 300.0
    strikes: int = 2
    max_age: float = inf
    age_grace: float = inf

    def interval(self, longest: float) -> float:
        """Return the interval of sweeps, at most ``longest``: each time is exceeded by a quarter of it at most."""
        return max(0.02, min(longest, self.time / 4, self.timeout / 4, self.max_age / 20, self.age_grace / 4))


class _Pings:
    """The pings of one connection. ``sent`` is the number of answers on the connection so far."""

    __slots__ = ("_answered", "_last", "_ours", "_received_at", "_strikes", "_waiting_since", "expires")

    def __init__(self, keepalive: Keepalive, now: float) -> None:
        #: When the connection is too old. It varies by 10 % at random, so that not all clients reconnect at once.
        self.expires = now + keepalive.max_age * random.uniform(0.9, 1.1)
        self._received_at = now
        self._waiting_since = inf
        self._last = -inf
        self._strikes = self._ours = 0
        self._answered = 0

    def is_one_too_many(self, keepalive: Keepalive, now: float, sent: int, has_calls: bool) -> bool:
        """Count a ping of the peer. Return true if it is one more than allowed."""
        self._reset_if_answered(sent)
        idle = not has_calls and not keepalive.without_calls
        allowed = self._last + (_IDLE_INTERVAL if idle else keepalive.peer_interval)
        self._last = now
        if now >= allowed:
            return False
        self._strikes += 1
        return 0 < keepalive.strikes < self._strikes

    def received(self, now: float) -> None:
        """Note that bytes have arrived from the peer."""
        self._received_at = now
        self._waiting_since = inf

    def is_due(self, keepalive: Keepalive, now: float, sent: int, has_calls: bool) -> bool:
        """True if a ping must be sent now. It then counts as sent."""
        self._reset_if_answered(sent)
        if now - self._received_at < keepalive.time or self._waiting_since != inf:
            return False
        if not (has_calls or keepalive.without_calls):
            return False
        if 0 < keepalive.pings_without_data <= self._ours:
            return False
        self._ours += 1
        self._waiting_since = now
        return True

    def is_overdue(self, keepalive: Keepalive, now: float) -> bool:
        """True if nothing has arrived for ``keepalive.timeout`` since our ping."""
        return now - self._waiting_since >= keepalive.timeout

    def _reset_if_answered(self, sent: int) -> None:
        """Reset the counts if answers were sent since the last ping."""
        if sent != self._answered:
            self._answered = sent
            self._strikes = self._ours = 0
            self._last = -inf


class Lifetime:
    """Decides when one connection ends.

    It ends when its peer stops in the middle of a frame, does not read, or does not answer pings; when it is too old;
    and when the server stops. Times are checked in `sweep`.
    """

    __slots__ = (
        "_age_ends",
        "_connection",
        "_keepalive",
        "_loop",
        "_owed_since",
        "_partial_since",
        "_pings",
        "_stuck_since",
        "_swept_at",
        "_unread_since",
    )

    def __init__(self, connection: Connection, keepalive: Keepalive) -> None:
        self._connection, self._keepalive = connection, keepalive
        self._loop = asyncio.get_running_loop()
        self._swept_at = now = self._loop.time()
        self._pings = _Pings(keepalive, now)
        self._partial_since = self._unread_since = self._stuck_since = self._age_ends = inf
        self._owed_since = inf

    def sweep(self, now: float) -> None:
        """Abort the connection if something takes too long, and reset the counts. ``now`` is the loop's time."""
        connection = self._connection
        connection.allowance.renew()
        for stream in tuple(connection.streams.values()):
            stream.sweep(now)
        if connection.ignores_input or self._is_stuck(now) or self._is_lost(now) or self._is_too_old(now):
            connection.abort()

    def _is_stuck(self, now: float) -> bool:
        """True if the peer has stopped in the middle of a frame, or reads its answers too slowly."""
        connection = self._connection
        receiver, sender, limits = connection.receiver, connection.sender, connection.limits
        is_owed = receiver.is_incomplete and not receiver.has_moved
        self._partial_since = min(self._partial_since, now) if is_owed else inf
        memory, since = connection.memory, now - self._swept_at
        patience = limits.unread_seconds
        if memory.unread_bytes > limits.unread_bytes >> 1:
            patience /= 10
        due_bytes = memory.unread_bytes * since / patience
        is_unread = memory.unread_bytes * since > SLOW_S * sender.moved_bytes
        memory.is_slow = is_unread if memory.unread_bytes else connection.is_quiet
        memory.forget_largest()
        is_read = (sender.has_moved and sender.moved_bytes >= due_bytes) or (sender.is_writable and not sender.waiting)
        self._unread_since = inf if is_read else min(self._unread_since, now)
        receiver.has_moved = sender.has_moved = False
        sender.moved_bytes, self._swept_at = 0, now
        return now - self._partial_since > limits.head_seconds or now - self._unread_since > patience

    def _is_lost(self, now: float) -> bool:
        """True if the peer has not answered our ping in time. Sends a ping when one is due."""
        connection, keepalive, pings = self._connection, self._keepalive, self._pings
        if not connection.is_quiet:
            connection.is_quiet = True
            pings.received(now)
        if pings.is_due(keepalive, now, connection.sender.count, bool(connection.streams)):
            connection.sender.write(frames.frame(frames.PING, 0, 0, _KEEPALIVE_PING))
        return pings.is_overdue(keepalive, now)

    def _is_too_old(self, now: float) -> bool:
        """True if the connection is too old and its grace time is over. Begins the grace time when it is due."""
        if now >= self._pings.expires:
            self._pings.expires = inf
            self._age_ends = now + self._keepalive.age_grace
            self.shut_down()
        return now >= self._age_ends

    def ping_received(self, payload: bytes) -> None:
        """Answer a ping. Raises `ConnectionFault` if it is one more than allowed."""
        connection = self._connection
        sender, now = connection.sender, self._loop.time()
        sender.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        if self._pings.is_one_too_many(self._keepalive, now, sender.count, bool(connection.streams)):
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too_many_pings")

    def ping_answered(self, payload: bytes) -> None:
        """Handle the answer to our ping: the peer has read everything that was sent before it.

        At shutdown it has also sent all streams that it opened before: send the final GOAWAY.
        """
        connection = self._connection
        if payload == _GRACE_PING and connection.is_leaving and connection.last_taken == LAST_ID:
            connection.last_taken = connection.last_id
            connection.sender.write(frames.goaway(connection.last_id, NO_ERROR))
            if not connection.active:
                connection.leave()

    # ------------------------------------------------------------------ the server stops

    def shut_down(self) -> None:
        """Announce the end to the peer, answer the open calls, and close after the last one."""
        connection = self._connection
        if connection.is_leaving or connection.transport.is_closing():
            return
        connection.is_leaving = True
        if not connection.receiver.is_greeted:
            connection.transport.close()
            return
        # The peer may have opened streams that have not arrived yet. Its answer to the ping arrives after them.
        connection.sender.write(frames.goaway(LAST_ID, NO_ERROR) + frames.frame(frames.PING, 0, 0, _GRACE_PING))
        self._loop.call_later(_GRACE_SECONDS, self.ping_answered, _GRACE_PING)

    def shut_down_streams(self) -> None:
        """End the streams whose work has not begun. Called after `shut_down`."""
        for stream in tuple(self._connection.streams.values()):
            stream.shut_down()

    def end_if_unread(self, now: float, reading_seconds: float) -> None:
        """End the connection if only the peer's reading is waited for, and it is too slow.

        Too slow is nothing read for 0.5 s, or not everything read after ``reading_seconds``. While answers are still
        being made, it is nothing read for ``reading_seconds``.
        """
        connection = self._connection
        if connection.ignores_input:
            connection.abort()
        sender = connection.sender
        making = [stream for stream in connection.streams.values() if stream.is_busy]
        is_waited_for = not all(stream.is_blocked for stream in making)
        is_unread = bool(sender.waiting) or not sender.is_writable
        self._owed_since = min(self._owed_since, now) if is_unread and not making else inf
        if now - self._owed_since > reading_seconds:
            self._end()
            return
        if sender.has_moved or is_waited_for or not is_unread:
            sender.has_moved = False
            self._stuck_since = inf
            return
        self._stuck_since = min(self._stuck_since, now)
        if now - self._stuck_since > (reading_seconds if making else _UNREAD_SECONDS):
            self._end()

    def _end(self) -> None:
        """End all streams of a peer that does not read; abort the connection if it is already closing."""
        if self._connection.transport.is_closing():
            self._connection.abort()
        self.terminate()

    def terminate(self) -> None:
        """End all streams, each with its last answer, and close the connection when that is written."""
        connection = self._connection
        if connection.ignores_input or connection.transport.is_closing():
            return
        connection.is_leaving, connection.last_taken = True, connection.last_id
        connection.sender.write(frames.goaway(connection.last_id, NO_ERROR))
        for stream in tuple(connection.streams.values()):
            stream.terminate()
        connection.sender.flush()
        connection.transport.close()
