"""Limits on one peer, and a time budget for all peers together (docs/spec/security.md C14).

The limits of one connection are far above what a gRPC client needs. Rates are counted from one sweep to the next. A
sweep runs every `SWEEP_SECONDS`, or more often.

A frame costs more to read than to send: the frames that one socket delivers in one turn of the event loop can take half
a second, and a hundred sockets a hundred times that. So all connections share one budget per turn. Bytes that arrive
after it is spent stay unread in their socket until the next turn. Connections that had no turn yet go first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

from headrace_grpc.http2.frames import ENHANCE_YOUR_CALM, ConnectionFault

SWEEP_SECONDS = 5.0
#: Bytes per second.
MIN_MESSAGE_RATE = 1024
#: Time for reading frames in one turn of the loop. The work in progress is finished first: about a millisecond more.
BUDGET_NS = 2_500_000
#: The part of the budget that connections which continue leave to bytes that arrive in this turn.
_RESERVED_NS = BUDGET_NS // 2
#: Estimated cost of waking one waiting task.
_TASK_NS = 50_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one connection.

    Requests of one connection use at most ``streams * stream_window + received_bytes`` of memory, or one request if it
    is larger. Its answers use at most ``unread_bytes``, or one answer if it is larger.
    """

    #: Streams whose call has not ended. A stream that was reset counts until its call ends.
    streams: int = 1024
    #: Bytes that a stream may send before its handler asks for more.
    stream_window: int = 256 * 1024
    #: Bytes that all streams may send between two WINDOW_UPDATEs. The server reads them from the socket at once.
    connection_window: int = 16 * 1024 * 1024
    frame_bytes: int = 1024 * 1024
    #: Size of a frame other than DATA. An incomplete one waits in memory.
    control_bytes: int = 32 * 1024
    #: Size of a decoded header list, as RFC 9113 counts it (section 6.5.2). A larger one is answered with an error.
    header_list_bytes: int = 16 * 1024
    #: A header list beyond this size is not decoded: the connection ends.
    header_list_hard_bytes: int = 32 * 1024
    #: One HEADERS frame and its CONTINUATIONs, encoded.
    header_block_bytes: int = 32 * 1024
    continuations: int = 16
    settings: int = 64

    #: Streams that the server resets because the peer broke a rule (CVE-2025-8671), per sweep. Streams that the peer
    #: resets (CVE-2023-44487) are not counted here: a client that cancels fast does the same. They count as
    #: ``streams`` until their call ends, and opening one waits for a turn of the loop like any other work.
    faults: int = 10_000
    #: Frames that cost work and do nothing, per sweep: pings, settings, empty data, priorities (CVE-2019-9511 to 9518).
    idle_frames: int = 10_000
    #: Further idle frames for each answer and for each stream that the peer resets: gRPC's core sends window
    #: updates, a ping and a reset with a cancelled call.
    frames_per_answer: int = 8
    #: Bytes of control frames that wait for a peer that does not read. Beyond it the server stops reading the peer.
    backlog_bytes: int = 64 * 1024

    #: Time for the preface, for a frame other than DATA, or for a header block, from its first byte.
    head_seconds: float = 20.0
    #: Time to read all waiting answers, checked as a rate: a tenth of the bytes in a tenth of the time. If more than
    #: half of ``unread_bytes`` waits, the peer has a tenth of this time.
    unread_seconds: float = 300.0
    #: Bytes of answers that wait for the peer, on all streams. An answer in preparation counts as large as the
    #: largest before. While there is no room, new calls are opened but not started, and an answer that does not fit
    #: is replaced by an error.
    unread_bytes: int = 512 * 1024 * 1024
    #: Bytes of messages larger than a window, arriving or in flight. Further ones get no credit until there is room.
    received_bytes: int = 512 * 1024 * 1024
    #: Bytes that all connections hold. Beyond it connections end, slow ones and large ones first. 0: no limit but the
    #: budget of `Connections`.
    held_bytes: int = 0
    #: A call ends if its request message arrives at less than `MIN_MESSAGE_RATE` bytes per second for longer than this.
    message_seconds: float = 60.0


class Allowance:
    """Counts the faults and idle frames of one connection. Its methods raise `ConnectionFault` beyond `Limits`.

    ``answers`` returns the number of answers sent so far: each allows `Limits.frames_per_answer` more frames.
    """

    __slots__ = ("_answers", "_answers_before", "_faults", "_idle_left", "_limits")

    def __init__(self, limits: Limits, answers: Callable[[], int]) -> None:
        self._limits, self._answers = limits, answers
        self._faults = self._answers_before = 0
        #: Idle frames that may still arrive before the next sweep, without those that answers allow.
        self._idle_left = limits.idle_frames

    def renew(self) -> None:
        """Reset the counts. Called by each sweep."""
        self._faults = 0
        self._idle_left = self._limits.idle_frames
        self._answers_before = self._answers()

    def count_idle(self, frames: int = 1) -> None:
        """Count ``frames`` that do nothing, or work that costs as much."""
        self._idle_left -= frames
        if self._idle_left < 0:
            answers = self._answers() - self._answers_before
            self._answers_before += answers
            self._idle_left += answers * self._limits.frames_per_answer
            if self._idle_left < 0:
                raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames without a use")

    def count_reset(self) -> None:
        """Allow more frames, because the peer has reset a stream: a cancelled call has other frames beside it."""
        self._idle_left += self._limits.frames_per_answer

    def count_fault(self) -> None:
        """Count a stream that the server reset because the peer broke a rule."""
        self._faults += 1
        if self._faults > self._limits.faults:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many streams were reset")


class Turns:
    """The time budget that all connections share in one turn of the event loop. Used on the event loop only.

    Subtract the cost of each step, measured or estimated, from ``left_ns``. Call `is_over` when the result is
    negative: until then the check costs nothing.
    """

    def __init__(self) -> None:
        self._call_soon = asyncio.get_running_loop().call_soon
        self._create_future = asyncio.get_running_loop().create_future
        self.left_ns = BUDGET_NS
        self._since_ns = 0
        #: True if the loop has begun another turn since the budget was filled.
        self._has_turned = False
        self._is_serving = False
        self._first: deque[Callable[[], object]] = deque()
        self._later: deque[Callable[[], object]] = deque()
        self._call_soon(self._turned)

    @property
    def is_crowded(self) -> bool:
        """True if connections wait that did not have a turn yet."""
        return bool(self._first)

    def begin(self) -> None:
        """Start the clock."""
        self._since_ns = perf_counter_ns()

    def spend(self) -> None:
        """Subtract the time since the last `begin` or `spend`."""
        now = perf_counter_ns()
        self.left_ns -= now - self._since_ns
        self._since_ns = now

    def is_over(self) -> bool:
        """True if the caller must `wait` for the next turn. Call it when ``left_ns`` is negative."""
        if not self._has_turned:
            return True
        self._fill()
        return False

    def wait(self, go_on: Callable[[], object]) -> None:
        """Call ``go_on`` in the next turn of the loop, or in a later one."""
        self._first.append(go_on)
        self._serve_soon()

    def wait_again(self, go_on: Callable[[], object]) -> None:
        """Like `wait`, but after all callers that did not have a turn yet."""
        self._later.append(go_on)
        self._serve_soon()

    async def task_turn(self) -> None:
        """Wait for a turn, from a task."""
        turn = self._create_future()
        self.wait(partial(_end, turn))
        await turn
        self.left_ns -= _TASK_NS

    def _serve_soon(self) -> None:
        if not self._is_serving:
            self._is_serving = True
            self._call_soon(self._serve)

    def _serve(self) -> None:
        self._is_serving = False
        self._fill()
        first, later = self._first, self._later
        while first and self.left_ns >= 0:
            first.popleft()()
        while later and self.left_ns >= _RESERVED_NS:
            later.popleft()()
        if first or later:
            self._serve_soon()

    def _fill(self) -> None:
        self.left_ns = BUDGET_NS
        self._has_turned = False
        self._call_soon(self._turned)

    def _turned(self) -> None:
        self._has_turned = True


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # done: the task was cancelled
        turn.set_result(None)
