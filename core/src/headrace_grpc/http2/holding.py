"""What one connection makes the server hold, in bytes: requests that arrive or are in flight, and unread answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from headrace.frontends.held_bytes import HeldBytes
from headrace_grpc.http2.frames import ENHANCE_YOUR_CALM, ConnectionFault
from headrace_grpc.http2.limits import Limits, Turns

#: What a connection that ends must have held for its memory to be returned to the system at once.
_MUCH_BYTES = 1 << 20
#: No bound on the calls of a connection whose answers do not wait.
_ANY = 1 << 30


class CountedStream(Protocol):
    """A stream whose requests are counted: what it has been granted, and what it keeps."""

    granted_bytes: int
    kept_bytes: int
    is_counted: bool

    def credit(self, size_bytes: int) -> None:
        """Let the peer send so much more."""


class PeerHoldings:
    """Of one connection.

    Answers: while as many wait as may, with those that are being made as large as the largest before, further calls
    are held back. Requests: a message that is larger than a window is let in when there is room for it.
    """

    __slots__ = (
        *("_begun", "_fail", "_granted_bytes", "_is_over", "_ledger", "_limits", "_turns", "held_back", "is_slow"),
        *("largest_bytes", "long_calls"),
        *("most_active", "received_bytes", "unread_bytes", "waiting"),
    )

    def __init__(
        self,
        limits: Limits,
        ledger: HeldBytes,
        turns: Turns,
        begun: Callable[[], int],
        fail: Callable[[ConnectionFault], None],
    ) -> None:
        """``begun`` says how many calls are open and have no answer that waits; ``fail`` ends the connection."""
        self._limits, self._ledger, self._turns = limits, ledger, turns
        self._begun, self._fail = begun, fail
        self._is_over = False
        #: Of answers that wait for the peer, and the largest that had to.
        self.unread_bytes = self.largest_bytes = 0
        #: Up to so many calls may be open before `is_full` has to be asked.
        self.most_active = _ANY
        #: Calls that begin when others are answered and read.
        self.held_back: deque[Callable[[], object]] = deque()
        #: Open calls with any number of answers, of which one at a time waits here.
        self.long_calls = 0
        #: Of requests that arrive or are in flight, as far as they are counted.
        self.received_bytes = self._granted_bytes = 0
        #: Streams whose message is larger than their window, in turn, and what they lack.
        self.waiting: dict[CountedStream, int] = {}
        #: True if the peer moves what is held so slowly that its connection ends before others. Set by sweeps.
        self.is_slow = False

    # ------------------------------------------------------------------ answers

    @property
    def is_full(self) -> bool:
        """True if no further call should begin."""
        begun = max(0, self._begun() - len(self.held_back) - self.long_calls)
        wanted = self.unread_bytes + (begun + 1) * self.largest_bytes
        return bool(self.unread_bytes or begun) and wanted > self._limits.unread_bytes

    def has_room(self, size_bytes: int) -> bool:
        """True if an answer of ``size_bytes`` may wait with those that do; the first may, whatever its size."""
        return not self.unread_bytes or self.unread_bytes + size_bytes <= self._limits.unread_bytes

    def hold_back(self, begin: Callable[[], object]) -> None:
        """Call ``begin`` when there is room for an answer."""
        self.held_back.append(begin)
        self.let_begin()

    def let_begin(self) -> None:
        """Begin the calls for which there is room."""
        held_back, turns = self.held_back, self._turns
        while held_back and not self.is_full:
            turns.wait(held_back.popleft())

    def wait(self, size_bytes: int) -> None:
        """``size_bytes`` of an answer wait for the peer."""
        self.unread_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, size_bytes)
        self._note()

    def gone(self, size_bytes: int) -> None:
        """So much of what waited has been sent, or will not be."""
        self.unread_bytes -= size_bytes
        self._note()
        if self.held_back:
            self.let_begin()

    def forget_largest(self) -> None:
        """Let one large answer not count for ever. Called by sweeps."""
        if self.largest_bytes and not self.unread_bytes:
            self.largest_bytes >>= 1
            self._note()
            self.let_begin()

    # ------------------------------------------------------------------ requests

    def grant(self, stream: CountedStream, size_bytes: int) -> None:
        """Let the peer send ``size_bytes`` more of a large message, now or when there is room."""
        limit = self._limits.received_bytes
        if stream in self.waiting or (self._granted_bytes and self._granted_bytes + size_bytes > limit):
            self.waiting[stream] = size_bytes
            stream.is_counted = True
        else:
            self._granted_bytes += size_bytes
            stream.granted_bytes += size_bytes
            stream.is_counted = True
            stream.credit(size_bytes)

    def keep(self, stream: CountedStream, size_bytes: int) -> None:
        """``stream`` keeps ``size_bytes`` of requests now."""
        self.received_bytes += size_bytes - stream.kept_bytes
        stream.kept_bytes = size_bytes
        stream.is_counted = True
        self._note()

    def let_go(self, stream: CountedStream, size_bytes: int = 0) -> None:
        """A large message of ``stream`` has been answered, or taken; it keeps ``size_bytes`` of others."""
        self.waiting.pop(stream, None)
        self._granted_bytes -= stream.granted_bytes
        stream.granted_bytes = 0
        self.keep(stream, size_bytes)
        stream.is_counted = bool(size_bytes)
        waiting, limit = self.waiting, self._limits.received_bytes
        while waiting:
            first, wanted = next(iter(waiting.items()))
            if self._granted_bytes and self._granted_bytes + wanted > limit:
                break
            del waiting[first]
            self.grant(first, wanted)

    # ------------------------------------------------------------------ all connections together

    @property
    def waits_for_peer(self) -> bool:
        return True

    def shed(self) -> None:
        self._is_over = True
        reason = "the server holds as many bytes of requests and answers as it may"
        self._fail(ConnectionFault(ENHANCE_YOUR_CALM, reason))

    def end(self) -> bool:
        """Return true if much is let go: the connection is lost."""
        self._is_over = True
        self._ledger.set(self, 0)
        return self.unread_bytes + self.received_bytes > _MUCH_BYTES

    def _note(self) -> None:
        if self.largest_bytes:
            self.most_active = (self._limits.unread_bytes - self.unread_bytes) // self.largest_bytes
        else:
            self.most_active = _ANY
        if not self._is_over:  # else what is left of it goes soon
            self._ledger.set(self, self.unread_bytes + self.received_bytes)
