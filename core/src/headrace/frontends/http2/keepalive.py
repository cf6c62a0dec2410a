"""Pings in both directions, and how old a connection may become (docs/spec/behaviours.md section 2.6).

As grpc's core has it: https://github.com/grpc/grpc/blob/master/doc/keepalive.md
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

#: Between the pings of a peer that has no calls, where pings without calls are not permitted.
_IDLE_INTERVAL = 7200.0


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


class Pings:
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
