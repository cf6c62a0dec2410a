"""The bytes that connections hold: requests that arrive or run, and responses that callers have not read.

Each connection is limited by its protocol; this limits all of them together, in three steps::

    up to 3/4 of the limit   large bodies arrive as fast as their callers send
    above                    a large body waits until its rest fits, in order of arrival; its caller is not read
    beyond the limit         slow callers end, then bodies that wait are refused; at 17/16, the largest callers end

No deadlock: bodies that wait half way hold bytes. If the first of them could not fit even when all other work is done,
the last ones are refused until it can. Each waits for a limited time.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

#: If too much is held, connections are ended until 1/8 of the limit is free.
_ROOM = 8
#: Connections that are not slow end only if 1/16 more is held: a response is there before its request is dropped.
_OVER = 16
#: A caller is slow if it would take longer than 60 s, at its last rate, to move all that is held for it.
SLOW_S = 60
#: A body waits at most this time, by default.
WAIT_S = 30.0
#: In one turn of the event loop, bodies that arrive get this many bytes together, but each of them at least 64 KiB.
_TURN_BYTES, _LEAST_BYTES = 16 << 20, 64 << 10
#: At most this many bodies proceed, and connections or bodies are refused, in one turn: about 3 ms.
_PER_TURN = 32
#: Up to this many connections, large bodies are read without turns.
_CROWD = 16
#: While bodies wait, slow callers and the end of their time are checked every 0.25 s.
_TICK_S = 0.25


class Holder(Protocol):
    """A connection."""

    @property
    def waits_for_peer(self) -> bool:
        """True if some of what it holds waits for the caller to send or read more."""

    @property
    def is_slow(self) -> bool:
        """True if the caller would take more than `SLOW_S` for that."""

    def shed(self) -> None:
        """End the connection: all connections together hold too much."""


class Refusable(Protocol):
    """A request whose body arrives."""

    @property
    def peer(self) -> str:
        """The address of its caller; empty if unknown."""

    def refuse(self, reason: str) -> None:
        """Refuse the request, and hold nothing for it."""


class Waiter(Refusable, Protocol):
    """A request whose body arrives, and must wait."""

    @property
    def kept_bytes(self) -> int:
        """The bytes that have arrived, as far as a refusal frees them."""

    def proceed(self) -> None:
        """Let the bytes arrive that were asked for. The connection must count them as held now, before they arrive."""


class _Place(NamedTuple):
    """A place in the queue of bodies: what it asks for, and the loop's time at which its time is over."""

    wanted_bytes: int
    ends: float


class HeldBytes:
    """The sizes of the connections that hold bytes. Event loop only.

    One object is the budget of the process. A port with a limit of its own has another one within it, as ``whole``.
    """

    def __init__(self, limit_bytes: int, whole: HeldBytes | None = None, wait_s: float = WAIT_S) -> None:
        self.limit_bytes = limit_bytes
        #: Above this, bodies ask before more of them arrives.
        self.soft_bytes = limit_bytes - limit_bytes // 4
        self._whole, self._wait_s = whole, wait_s
        #: The largest request that can ever fit.
        self.largest_bytes = limit_bytes
        #: Bytes of connections, and bytes that belong to none.
        self.total_bytes = self.other_bytes = 0
        #: How much one body may receive in one turn of the event loop.
        self.turn_bytes = _TURN_BYTES
        #: True if large bodies must `ask`. May be true for a moment too long.
        self.is_tight = False
        #: Requests that were refused, and connections that were ended.
        self.refused = 0
        self._sizes: dict[Holder, int] = {}
        self._waiting: dict[Waiter, _Place] = {}
        self._is_due = False
        self._left = 0  # of `_PER_TURN`
        self._timer: asyncio.TimerHandle | None = None

    @property
    def in_use_bytes(self) -> int:
        """The bytes of connections and the others."""
        return self.total_bytes + self.other_bytes

    @property
    def is_full(self) -> bool:
        """True if more than the limit is in use."""
        return self.in_use_bytes > self.limit_bytes

    def is_short(self) -> bool:
        """True if more than half of the limit is in use."""
        return self.in_use_bytes > self.limit_bytes >> 1

    @property
    def is_crowded(self) -> bool:
        """True if so many connections hold bytes that each reads `turn_bytes` and waits for its next turn."""
        return len(self._sizes) > _CROWD

    @property
    def waiting(self) -> int:
        """The number of bodies that wait."""
        return len(self._waiting)

    def set(self, holder: Holder, size_bytes: int) -> None:
        """Record that ``holder`` holds ``size_bytes`` now."""
        sizes = self._sizes
        more = size_bytes - sizes.get(holder, 0)
        self.total_bytes += more
        if size_bytes:
            sizes[holder] = size_bytes
        else:
            sizes.pop(holder, None)
        self.turn_bytes = max(_LEAST_BYTES, _TURN_BYTES // (len(sizes) or 1))
        if more > 0:
            self.grown()
        elif self._waiting:
            self._act_soon()
        if self._whole is not None:
            self._whole.set(holder, size_bytes)

    def grown(self) -> None:
        """Make room soon if more than the limit is in use now."""
        in_use = self.in_use_bytes
        self.is_tight = in_use > self.soft_bytes or bool(self._waiting)
        if in_use > self.limit_bytes:
            self._act_soon()

    # ------------------------------------------------------------------ bodies that wait

    def ask(self, waiter: Waiter, wanted_bytes: int, is_slow: bool = False) -> None:
        """Let ``waiter`` proceed with ``wanted_bytes``, now or later, or refuse it. It asks once at a time.

        A slow caller does not wait: its body is refused.
        """
        self.recount()
        if not self._waiting and self.in_use_bytes + wanted_bytes <= self.limit_bytes:
            waiter.proceed()
        elif is_slow:
            self.refuse(waiter, "arrives slowly")
        else:
            loop = asyncio.get_running_loop()
            self._waiting[waiter] = _Place(wanted_bytes, loop.time() + self._wait_s)
            self.hit()
            self._act_soon()
            if self._timer is None:
                self._timer = loop.call_later(_TICK_S, self._tick)

    def leave(self, waiter: Waiter) -> None:
        """Forget ``waiter``, if it waits: its request has ended."""
        if self._waiting.pop(waiter, None) is not None:
            self._act_soon()

    def recount(self) -> None:
        """Bring `other_bytes` up to date."""
        self.is_tight = self.in_use_bytes > self.soft_bytes or bool(self._waiting)

    def hit(self) -> None:
        """Note that something had to wait, or was refused or ended."""

    def refuse(self, waiter: Refusable, why: str) -> None:
        """Refuse ``waiter``, whose body ``why``."""
        self.refused += 1
        self._left -= 1
        self.hit()
        reason = (
            f"the request body {why}, and there is no memory for it: requests and responses take "
            f"{self.in_use_bytes} of the {self.limit_bytes} bytes that they may (--memory-budget), try again later"
        )
        self.audit(f"a request of {waiter.peer or 'a client'} is refused: {reason}")
        waiter.refuse(reason)

    def audit(self, text: str) -> None:
        """Note a refusal for the audit log."""
        if self._whole is not None:
            self._whole.audit(text)

    def _act_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        """Make room, and let bodies proceed. Runs one turn of the loop later, so that no connection ends inside its
        own call."""
        self._is_due, self._left = False, _PER_TURN
        self.recount()
        if self.in_use_bytes > self.limit_bytes:
            self._make_room()
        waiting = self._waiting
        while waiting and self._left > 0:
            first, place = next(iter(waiting.items()))
            if self.in_use_bytes + place.wanted_bytes <= self.limit_bytes:
                del waiting[first]
                self._left -= 1
                first.proceed()
            elif sum([each.kept_bytes for each in waiting]) + place.wanted_bytes > self.limit_bytes:
                self._refuse_last()
            else:
                break
        if self._left <= 0:
            self._act_soon()
        self.recount()

    def _refuse_last(self) -> None:
        """Refuse the body that has waited for the shortest time."""
        last, _ = self._waiting.popitem()
        self.refuse(last, "waits behind others")

    def _tick(self) -> None:
        """Refuse bodies that have waited too long, and end slow callers while other bodies wait."""
        self._timer = None
        loop = asyncio.get_running_loop()
        waiting, now = self._waiting, loop.time()
        self._left = _PER_TURN
        while waiting and self._left > 0:
            first, place = next(iter(waiting.items()))
            if place.ends > now:
                break
            del waiting[first]
            self.refuse(first, f"has waited for {self._wait_s:g} s")
        if waiting:
            self._end(place.wanted_bytes, only_slow=True)
            self._act_soon()
            self._timer = loop.call_later(_TICK_S if self._left > 0 else 0, self._tick)

    # ------------------------------------------------------------------ callers that are ended

    def _make_room(self) -> None:
        """End connections until 1/8 of the limit is free: slow ones, bodies that wait, then those that hold most."""
        self.hit()
        room = self.limit_bytes // _ROOM
        self._end(room, only_slow=True)
        while self._waiting and self.in_use_bytes > self.limit_bytes and self._left > 0:
            self._refuse_last()
        if self.in_use_bytes > self.limit_bytes + self.limit_bytes // _OVER:
            self._end(room, only_slow=False)

    def _end(self, room_bytes: int, only_slow: bool) -> None:
        """End connections that wait for their callers until ``room_bytes`` are free."""
        if self.in_use_bytes <= self.limit_bytes - room_bytes:
            return
        holders = [each for each in self._sizes if each.waits_for_peer and (each.is_slow or not only_slow)]
        holders.sort(key=lambda holder: self._sizes[holder])
        while holders and self.in_use_bytes > self.limit_bytes - room_bytes and self._left > 0:
            holder = holders.pop()
            self.refused += 1
            self._left -= 1
            size = self._sizes[holder]
            self.audit(f"a connection that holds {size} bytes is ended: there is no memory (--memory-budget)")
            holder.shed()
            self.set(holder, 0)
