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
#: A peer gets the credit for a large message in steps: at least 1 MiB, and at most twice of what it has sent. So bytes
#: that are only announced take no memory from others.
_STEP_BYTES, _WINDOW_BYTES = 1 << 20, 128 << 10
#: `ConnectionMemory.most_active` while no answer waits: no limit.
_ANY = 1 << 30


class CountedStream(Protocol):
    """A stream whose request bytes are counted: those that it may still send, and those that it has sent."""

    granted_bytes: int
    kept_bytes: int
    is_counted: bool
    #: What it may send now.
    receive_window: int

    @property
    def peer(self) -> str:
        """The address of the peer; empty if unknown."""

    def credit(self, size_bytes: int) -> None:
        """Let the peer send ``size_bytes`` more."""

    def refuse(self, reason: str) -> None:
        """End the call: there is no memory for its message."""


class _Credit:
    """The credit that a stream gets for its large message, in steps."""

    __slots__ = ("_memory", "_stream", "is_begun", "owed_bytes", "promised_bytes", "waits")

    def __init__(self, memory: ConnectionMemory, stream: CountedStream) -> None:
        self._memory, self._stream = memory, stream
        #: Bytes that the stream may send without credit for them yet; bytes with credit that it has not sent.
        self.owed_bytes = self.promised_bytes = 0
        #: True once a step was asked for; true while it waits for memory.
        self.is_begun = self.waits = False

    @property
    def peer(self) -> str:
        return self._stream.peer

    @property
    def kept_bytes(self) -> int:
        return self._stream.kept_bytes

    def advance(self) -> None:
        """Give the next step, if the last one is nearly used up. If memory is short, ask for all of the rest."""
        stream, memory = self._stream, self._memory
        if not self.owed_bytes or self.waits or stream.receive_window > max(_WINDOW_BYTES, stream.kept_bytes >> 1):
            return
        if not self.is_begun:
            self.is_begun = True
            memory.promise(self, stream.receive_window)
        if memory.budget.is_tight:
            self.waits = True
            memory.budget.ask(self, self.owed_bytes, memory.is_slow)
        else:
            self._give(min(self.owed_bytes, max(_STEP_BYTES, 2 * stream.kept_bytes)))

    def proceed(self) -> None:
        self.waits = False
        self._give(self.owed_bytes)

    def refuse(self, reason: str) -> None:
        self.waits = False
        self._stream.refuse(reason)

    def leave(self) -> None:
        if self.waits:
            self.waits = False
            self._memory.budget.leave(self)

    def _give(self, size_bytes: int) -> None:
        self.owed_bytes -= size_bytes
        self._memory.promise(self, size_bytes)
        self._stream.credit(size_bytes)


class ConnectionMemory:
    """Counts what the server holds for one connection, and delays work that would exceed `Limits`.

    Answers: when `Limits.unread_bytes` are reached, further calls wait. An answer in preparation counts as large as
    the largest before. Requests: the peer may send a message larger than a window when there is room for it.
    """

    __slots__ = (
        *(
            "_arrives",
            "_begun",
            "_credits",
            "_fail",
            "_granted_bytes",
            "_is_over",
            "_ledger",
            "_limits",
            "_promised_bytes",
        ),
        *("_turns", "_unfreed_bytes", "_unsent_bytes", "budget", "held_back", "is_slow"),
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
        budget: HeldBytes | None = None,
        arrives: Callable[[], bool] = bool,
    ) -> None:
        """``begun`` returns the number of open calls without a waiting answer; ``fail`` ends the connection.

        ``arrives`` returns true if a counted request is incomplete. ``ledger`` counts within ``budget``.
        """
        self._limits, self._ledger, self._turns = limits, ledger, turns
        self.budget = budget or ledger
        self._begun, self._fail, self._arrives = begun, fail, arrives
        self._is_over = False
        #: Bytes of all answers that wait for the peer; size of the largest answer that had to wait.
        self.unread_bytes = self.largest_bytes = 0
        #: Bytes of answers whose memory exists: in the transport, and in queues, including their sent parts.
        self._unfreed_bytes = self._unsent_bytes = 0
        #: While at most this many calls are open, `is_full` is False and need not be computed.
        self.most_active = _ANY
        #: Calls that start when there is room for their answer.
        self.held_back: deque[Callable[[], object]] = deque()
        #: Open streaming calls. At most one answer of each waits here.
        self.long_calls = 0
        #: Bytes of counted requests that arrive or are in flight; bytes that counted streams may still send.
        self.received_bytes = self._granted_bytes = 0
        #: Bytes that streams have credit for and have not sent, of large messages.
        self._promised_bytes = 0
        self._credits: dict[CountedStream, _Credit] = {}
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
        self._unfreed_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, size_bytes)
        self._note()

    def dequeued(self, size_bytes: int) -> None:
        """Subtract ``size_bytes`` that waited and were sent or dropped."""
        self.unread_bytes -= size_bytes
        self._limit_calls()
        if self.held_back:
            self.let_begin()

    def freed(self, size_bytes: int, unsent_bytes: int) -> None:
        """Subtract ``size_bytes`` whose memory is freed, or in the ``unsent_bytes`` that a full transport has now."""
        self._unfreed_bytes -= size_bytes
        self._unsent_bytes = unsent_bytes
        self._note()

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
        """Let the peer send ``size_bytes`` more of a large message, in steps, now or when there is room."""
        if (known := self._credits.get(stream)) is not None and known.owed_bytes:
            known.advance()
            return
        limit = self._limits.received_bytes
        if stream in self.waiting or (self._granted_bytes and self._granted_bytes + size_bytes > limit):
            self.waiting[stream] = size_bytes
            stream.is_counted = True
        else:
            self._granted_bytes += size_bytes
            stream.granted_bytes += size_bytes
            stream.is_counted = True
            if known is None:
                self._credits[stream] = known = _Credit(self, stream)
            known.owed_bytes = size_bytes
            known.advance()

    def keep(self, stream: CountedStream, size_bytes: int) -> None:
        """Set the request bytes that the server holds for ``stream`` to ``size_bytes``."""
        more = size_bytes - stream.kept_bytes
        self.received_bytes += more
        stream.kept_bytes = size_bytes
        stream.is_counted = True
        if more > 0 and (credit := self._credits.get(stream)) is not None:
            self._keep_promise(credit, more)
        self._note()

    def promise(self, credit: _Credit, size_bytes: int) -> None:
        """Count ``size_bytes`` that a stream gets credit for now."""
        credit.promised_bytes += size_bytes
        self._promised_bytes += size_bytes
        self._note()

    def _keep_promise(self, credit: _Credit, size_bytes: int) -> None:
        """Count ``size_bytes`` no longer as promised: they have arrived, or never will."""
        size_bytes = min(size_bytes, credit.promised_bytes)
        credit.promised_bytes -= size_bytes
        self._promised_bytes -= size_bytes

    def may_end(self, stream: CountedStream, missing_bytes: int) -> bool:
        """Return False if the message of ``stream`` can not be kept. Called while memory is short.

        A message that needs no more credit can not wait: its ``missing_bytes`` count from now on, if they fit.
        """
        credit, budget = self._credits.get(stream), self.budget
        if credit is not None and credit.is_begun:
            return True
        if missing_bytes > stream.receive_window:  # it waits before it gets more credit
            return not budget.is_full
        if budget.in_use_bytes + missing_bytes > budget.limit_bytes:
            return False
        if credit is None:
            self._credits[stream] = credit = _Credit(self, stream)
        credit.is_begun = True
        self.promise(credit, missing_bytes)
        return True

    def holds_back(self, stream: CountedStream) -> bool:
        """True if the peer may not send more of the message of ``stream`` until there is room."""
        credit = self._credits.get(stream)
        return stream in self.waiting or (credit is not None and credit.waits)

    def release(self, stream: CountedStream, size_bytes: int = 0) -> None:
        """Release the large message of ``stream``: it was answered or read. ``size_bytes`` of other messages remain."""
        self.waiting.pop(stream, None)
        if (credit := self._credits.pop(stream, None)) is not None:
            credit.leave()
            self._keep_promise(credit, credit.promised_bytes)
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
        return bool(self.unread_bytes or self._unsent_bytes) or self._arrives()

    def shed(self) -> None:
        self._is_over = True
        reason = "the server holds as many bytes of requests and responses as it may (--memory-budget)"
        self._fail(ConnectionFault(ENHANCE_YOUR_CALM, reason))

    def end(self) -> bool:
        """Stop counting: the connection is closed. Return true if it held more than 1 MiB."""
        self._is_over = True
        self._ledger.set(self, 0)
        return self._unfreed_bytes + self.received_bytes > _MUCH_BYTES

    def _note(self) -> None:
        self._limit_calls()
        if not self._is_over:  # else the rest is released soon
            answers = self._unfreed_bytes + self._unsent_bytes
            self._ledger.set(self, answers + self.received_bytes + self._promised_bytes)

    def _limit_calls(self) -> None:
        if self.largest_bytes:
            self.most_active = (self._limits.unread_bytes - self.unread_bytes) // self.largest_bytes
        else:
            self.most_active = _ANY
