"""The bytes that the server holds for one connection: requests that arrive or are in flight, and unread answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from headrace_grpc.http2.frames import ENHANCE_YOUR_CALM, ConnectionFault
from headrace_grpc.http2.limits import Limits, Turns
from headrace_hosts.held_bytes import HeldBytes

#: If a connection that ends held more than this, its memory is returned to the system soon.
_MUCH_BYTES = 1 << 20
#: `ConnectionMemory.most_active` while no answer waits: no limit.
_ANY = 1 << 30


class CountedStream(Protocol):
    """A stream whose request bytes are counted: those that it may still send, and those that it has sent."""

    granted_bytes: int
    kept_bytes: int
    is_counted: bool

    def credit(self, size_bytes: int) -> None:
        """Let the peer send ``size_bytes`` more."""


class ConnectionMemory:
    """Counts what the server holds for one connection, and delays work that would exceed `Limits`.

    Answers: when `Limits.unread_bytes` are reached, further calls wait. An answer in preparation counts as large as
    the largest before. Requests: the peer may send a message larger than a window when there is room for it.
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
        """``begun`` returns the number of open calls without a waiting answer; ``fail`` ends the connection."""
        self._limits, self._ledger, self._turns = limits, ledger, turns
        self._begun, self._fail = begun, fail
        self._is_over = False
        #: Bytes of all answers that wait for the peer; size of the largest answer that had to wait.
        self.unread_bytes = self.largest_bytes = 0
        #: While at most this many calls are open, `is_full` is False and need not be computed.
        self.most_active = _ANY
        #: Calls that start when there is room for their answer.
        self.held_back: deque[Callable[[], object]] = deque()
        #: Open streaming calls. At most one answer of each waits here.
        self.long_calls = 0
        #: Bytes of counted requests that arrive or are in flight; bytes that counted streams may still send.
        self.received_bytes = self._granted_bytes = 0
        #: Streams whose message is larger than their window, first come first, with the bytes that they want to send.
        self.waiting: dict[CountedStream, int] = {}
        #: True if the peer sends or reads so slowly that its connection ends before others. Set by sweeps.
        self.is_slow = False

    # ------------------------------------------------------------------ answers

    @property
    def is_full(self) -> bool:
        """True if no further call may start."""
        begun = max(0, self._begun() - len(self.held_back) - self.long_calls)
        wanted = self.unread_bytes + (begun + 1) * self.largest_bytes
        return bool(self.unread_bytes or begun) and wanted > self._limits.unread_bytes

    def has_room(self, size_bytes: int) -> bool:
        """True if one more answer of ``size_bytes`` may wait. If no other answer waits, any size may."""
        return not self.unread_bytes or self.unread_bytes + size_bytes <= self._limits.unread_bytes

    def hold_back(self, begin: Callable[[], object]) -> None:
        """Call ``begin`` when there is room for its answer."""
        self.held_back.append(begin)
        self.let_begin()

    def let_begin(self) -> None:
        """Start the calls for which there is room now."""
        held_back, turns = self.held_back, self._turns
        while held_back and not self.is_full:
            turns.wait(held_back.popleft())

    def wait(self, size_bytes: int) -> None:
        """Count ``size_bytes`` of an answer that waits for the peer."""
        self.unread_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, size_bytes)
        self._note()

    def gone(self, size_bytes: int) -> None:
        """Subtract ``size_bytes`` that waited and were sent or dropped."""
        self.unread_bytes -= size_bytes
        self._note()
        if self.held_back:
            self.let_begin()

    def forget_largest(self) -> None:
        """Halve the size of the largest answer, if none waits: one large answer must not limit calls for ever.

        Called by sweeps.
        """
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
        """Set the request bytes that the server holds for ``stream`` to ``size_bytes``."""
        self.received_bytes += size_bytes - stream.kept_bytes
        stream.kept_bytes = size_bytes
        stream.is_counted = True
        self._note()

    def let_go(self, stream: CountedStream, size_bytes: int = 0) -> None:
        """Release the large message of ``stream``: it was answered or read. ``size_bytes`` of other messages remain."""
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
        """Stop counting: the connection is closed. Return true if it held more than 1 MiB."""
        self._is_over = True
        self._ledger.set(self, 0)
        return self.unread_bytes + self.received_bytes > _MUCH_BYTES

    def _note(self) -> None:
        if self.largest_bytes:
            self.most_active = (self._limits.unread_bytes - self.unread_bytes) // self.largest_bytes
        else:
            self.most_active = _ANY
        if not self._is_over:  # else the rest is released soon
            self._ledger.set(self, self.unread_bytes + self.received_bytes)
