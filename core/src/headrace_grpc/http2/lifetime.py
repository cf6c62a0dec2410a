"""How long a connection is kept: pings in both directions, its age, what its peer owes, and the end of the server.

Source: docs/spec/behaviours.md section 2.6, and grpc's core: https://github.com/grpc/grpc/blob/master/doc/keepalive.md.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from headrace.frontends.held_bytes import SLOW_S
from headrace_grpc.http2 import frames
from headrace_grpc.http2.frames import ENHANCE_YOUR_CALM, LAST_ID, NO_ERROR, ConnectionFault

if TYPE_CHECKING:
    from headrace_grpc.http2.connection import Connection

#: Between the pings of a peer that has no calls, where pings without calls are not permitted.
_IDLE_INTERVAL = 7200.0
#: Eight bytes each, to tell the answers apart.
_GRACE_PING, _KEEPALIVE_PING = b"shutdown", b"keepaliv"
#: For the answer to the first: a peer that is gone must not hold up the end.
_GRACE_SECONDS = 0.5
#: For a peer to read, when the server stops and waits for nothing else.
_HURRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Seconds, `inf` for never."""

    time: float = 7200.0
    timeout: float = 20.0
    without_calls: bool = False
    #: Our pings between two answers; 0 is without bound.
    pings_without_data: int = 2
    #: The peer's pings between two answers must not come more often; ``strikes`` are forgiven, 0 forgives all.
    peer_interval: float = 300.0
    strikes: int = 2
    max_age: float = inf
    age_grace: float = inf

    def interval(self, longest: float) -> float:
        """How often to look, so that each time is kept within a quarter."""
        return max(0.02, min(longest, self.time / 4, self.timeout / 4, self.max_age / 20, self.age_grace / 4))


class _Pings:
    """The pings of one connection. ``sent`` counts what the connection has answered so far."""

    __slots__ = ("_answered", "_heard", "_last", "_ours", "_strikes", "_waiting_since", "expires")

    def __init__(self, keepalive: Keepalive, now: float) -> None:
        #: When the connection is too old; a tenth of it by chance, so that not all reconnect at once.
        self.expires = now + keepalive.max_age * random.uniform(0.9, 1.1)
        self._heard = now
        self._waiting_since = inf
        self._last = -inf
        self._strikes = self._ours = 0
        self._answered = 0

    def is_one_too_many(self, keepalive: Keepalive, now: float, sent: int, has_calls: bool) -> bool:
        """The peer has sent a ping: whether that is abuse."""
        self._look(sent)
        idle = not has_calls and not keepalive.without_calls
        allowed = self._last + (_IDLE_INTERVAL if idle else keepalive.peer_interval)
        self._last = now
        if now >= allowed:
            return False
        self._strikes += 1
        return 0 < keepalive.strikes < self._strikes

    def heard(self, now: float) -> None:
        """Something has come from the peer."""
        self._heard = now
        self._waiting_since = inf

    def is_due(self, keepalive: Keepalive, now: float, sent: int, has_calls: bool) -> bool:
        """Whether to send a ping now; it then counts as sent."""
        self._look(sent)
        if now - self._heard < keepalive.time or self._waiting_since != inf:
            return False
        if not (has_calls or keepalive.without_calls):
            return False
        if 0 < keepalive.pings_without_data <= self._ours:
            return False
        self._ours += 1
        self._waiting_since = now
        return True

    def is_overdue(self, keepalive: Keepalive, now: float) -> bool:
        """Whether the peer has not said a word since our ping."""
        return now - self._waiting_since >= keepalive.timeout

    def _look(self, sent: int) -> None:
        """Answers forgive what pings came before them."""
        if sent != self._answered:
            self._answered = sent
            self._strikes = self._ours = 0
            self._last = -inf


class Lifetime:
    """Of one connection: it ends when its peer does not go on with what it began, is lost, or when it is too old, and
    when the server stops.

    What takes time is looked at in `sweep`, from time to time.
    """

    __slots__ = (
        "_age_ends",
        "_connection",
        "_keepalive",
        "_looked_at",
        "_loop",
        "_owed_since",
        "_partial_since",
        "_pings",
        "_stuck_since",
        "_unread_since",
    )

    def __init__(self, connection: Connection, keepalive: Keepalive) -> None:
        self._connection, self._keepalive = connection, keepalive
        self._loop = asyncio.get_running_loop()
        self._looked_at = now = self._loop.time()
        self._pings = _Pings(keepalive, now)
        self._partial_since = self._unread_since = self._stuck_since = self._age_ends = inf
        self._owed_since = inf

    def sweep(self, now: float) -> None:
        """Look for what takes too long, and begin to count anew."""
        connection = self._connection
        connection.allowance.renew()
        for stream in tuple(connection.streams.values()):
            stream.look(now)
        if connection.is_deaf or self._is_stuck(now) or self._is_lost(now) or self._is_too_old(now):
            connection.abort()

    def _is_stuck(self, now: float) -> bool:
        """Whether the peer does not go on with what it says, or does not read what it asked for."""
        connection = self._connection
        receiver, sender, limits = connection.receiver, connection.sender, connection.limits
        is_owed = receiver.is_amid and not receiver.has_moved
        self._partial_since = min(self._partial_since, now) if is_owed else inf
        holding, since = connection.holding, now - self._looked_at
        patience = limits.unread_seconds
        if holding.unread_bytes > limits.unread_bytes >> 1:
            patience /= 10
        due_bytes = holding.unread_bytes * since / patience
        is_unread = holding.unread_bytes * since > SLOW_S * sender.moved_bytes
        holding.is_slow = is_unread if holding.unread_bytes else connection.is_quiet
        holding.forget_largest()
        is_read = (sender.has_moved and sender.moved_bytes >= due_bytes) or (sender.is_writable and not sender.waiting)
        self._unread_since = inf if is_read else min(self._unread_since, now)
        receiver.has_moved = sender.has_moved = False
        sender.moved_bytes, self._looked_at = 0, now
        return now - self._partial_since > limits.head_seconds or now - self._unread_since > patience

    def _is_lost(self, now: float) -> bool:
        """Whether the peer says nothing at all any more; asks it when it is time."""
        connection, keepalive, pings = self._connection, self._keepalive, self._pings
        if not connection.is_quiet:
            connection.is_quiet = True
            pings.heard(now)
        if pings.is_due(keepalive, now, connection.sender.count, bool(connection.streams)):
            connection.sender.write(frames.frame(frames.PING, 0, 0, _KEEPALIVE_PING))
        return pings.is_overdue(keepalive, now)

    def _is_too_old(self, now: float) -> bool:
        """Whether its time of grace is over; begins that when it is time."""
        if now >= self._pings.expires:
            self._pings.expires = inf
            self._age_ends = now + self._keepalive.age_grace
            self.shut_down()
        return now >= self._age_ends

    def ping_received(self, payload: bytes) -> None:
        """Answer it. Raises `ConnectionFault` if it is one too many."""
        connection = self._connection
        sender, now = connection.sender, self._loop.time()
        sender.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        if self._pings.is_one_too_many(self._keepalive, now, sender.count, bool(connection.streams)):
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too_many_pings")

    def ping_answered(self, payload: bytes) -> None:
        """The peer has read what was sent before the ping."""
        connection = self._connection
        if payload == _GRACE_PING and connection.is_leaving and connection.last_taken == LAST_ID:
            connection.last_taken = connection.last_id
            connection.sender.write(frames.goaway(connection.last_id, NO_ERROR))
            if not connection.active:
                connection.leave()

    # ------------------------------------------------------------------ the server stops

    def shut_down(self) -> None:
        """Take no more streams once the peer knows, answer what is open, then close."""
        connection = self._connection
        if connection.is_leaving or connection.transport.is_closing():
            return
        connection.is_leaving = True
        if not connection.receiver.is_greeted:
            connection.transport.close()
            return
        # The peer may have opened streams that we have not seen. Its answer to the ping comes after them.
        connection.sender.write(frames.goaway(LAST_ID, NO_ERROR) + frames.frame(frames.PING, 0, 0, _GRACE_PING))
        self._loop.call_later(_GRACE_SECONDS, self.ping_answered, _GRACE_PING)

    def farewell(self) -> None:
        """After `shut_down`: end the streams that nobody has begun to work for."""
        for stream in tuple(self._connection.streams.values()):
            stream.farewell()

    def hurry(self, now: float, reading_seconds: float) -> None:
        """Do not wait for a peer that has let `_HURRY_SECONDS` pass without reading its answers, or that has taken
        longer than ``reading_seconds`` to read them."""
        connection = self._connection
        if connection.is_deaf:
            connection.abort()
        sender = connection.sender
        is_waited_for = any(stream.is_busy and not stream.is_blocked for stream in connection.streams.values())
        is_unread = bool(sender.waiting) or not sender.is_writable
        self._owed_since = min(self._owed_since, now) if is_unread and not is_waited_for else inf
        if now - self._owed_since > reading_seconds:
            self._give_up()
            return
        if sender.has_moved or is_waited_for or not is_unread:
            sender.has_moved = False
            self._stuck_since = inf
            return
        self._stuck_since = min(self._stuck_since, now)
        if now - self._stuck_since > _HURRY_SECONDS:
            self._give_up()

    def _give_up(self) -> None:
        """End the streams of a peer that does not read, and the connection that waits for it to."""
        if self._connection.transport.is_closing():
            self._connection.abort()
        self.expel()

    def expel(self) -> None:
        """End all streams, each with what it has to say, and close as soon as that has been read."""
        connection = self._connection
        if connection.is_deaf or connection.transport.is_closing():
            return
        connection.is_leaving, connection.last_taken = True, connection.last_id
        connection.sender.write(frames.goaway(connection.last_id, NO_ERROR))
        for stream in tuple(connection.streams.values()):
            stream.expel()
        connection.sender.flush()
        connection.transport.close()
