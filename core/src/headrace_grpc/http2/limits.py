"""What a peer may do before its connection ends, and what all peers together may take of a turn of the event loop
(docs/spec/security.md C14).

The bounds of one connection are far from anything a gRPC client does. Rates are counted from one sweep to the next; a
sweep comes every `SWEEP_SECONDS`, or more often.

Frames are cheap to send and less cheap to read: one socket can hand over as many in a turn as cost half a second, and
a hundred sockets a hundred times that. So the connections share a budget. What comes when it is spent waits for the
next turn of the loop, unread in its socket; whoever did not have a turn yet goes before those who want to go on.
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
MESSAGE_PACE = 1024
#: Of one turn of the loop. What is under way then is finished first, which takes about a millisecond.
BUDGET_NS = 2_500_000
#: Of it, what those who only want to go on leave to what arrives in this turn.
_RESERVED_NS = BUDGET_NS // 2
#: What a waiting task takes of a turn when it is woken.
_TASK_NS = 50_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one connection.

    A connection makes the server hold at most ``streams`` times ``stream_window`` and ``received_bytes`` of requests,
    or one request, and ``unread_bytes`` of answers, or one answer.
    """

    #: Streams whose call has not ended, those included that were reset and still run.
    streams: int = 1024
    #: Bytes of a stream that may come before somebody wants them.
    stream_window: int = 256 * 1024
    #: Bytes of all streams between two credits. They are taken from the socket at once.
    connection_window: int = 16 * 1024 * 1024
    frame_bytes: int = 1024 * 1024
    #: Of frames other than DATA; what is incomplete waits in memory.
    control_bytes: int = 32 * 1024
    #: What a list of headers may add up to, unpacked, as RFC 9113 counts (section 6.5.2).
    header_list_bytes: int = 16 * 1024
    #: Beyond it the list is not even unpacked.
    header_list_hard_bytes: int = 32 * 1024
    #: One HEADERS frame and its CONTINUATIONs, packed.
    header_block_bytes: int = 32 * 1024
    continuations: int = 16
    settings: int = 64

    #: Streams that end early by a fault of the peer's (CVE-2025-8671). Those that it resets itself are not
    #: counted (CVE-2023-44487): a client that cancels fast does the same. They count among ``streams`` for as
    #: long as work for them goes on, and opening them waits for its turn like all else.
    faults: int = 10_000
    #: Frames that cost work and do nothing: pings, settings, empty data, priorities (CVE-2019-9511 to 9518).
    idle_frames: int = 10_000
    #: So many more for each answer, and each stream that the peer resets: grpc's core sends window updates,
    #: a ping and a reset with a call that is cancelled.
    frames_per_answer: int = 8
    #: Bytes of control frames that wait while the peer does not read; then it is not read either.
    backlog_bytes: int = 64 * 1024

    #: For the preface, a frame other than DATA, or a header block, once begun.
    head_seconds: float = 20.0
    #: In which a peer must read what it asked for: a tenth of what waits in a tenth of the time, and so on.
    #: A tenth of it is left to one that has more than half of ``unread_bytes`` waiting.
    unread_seconds: float = 300.0
    #: Bytes of answers that wait, of all streams, with those that are being made as large as the largest before.
    #: Calls that are opened then begin when there is room again. An answer for which there is none is refused.
    unread_bytes: int = 512 * 1024 * 1024
    #: Bytes of messages beyond a window, which arrive or are in flight. Further ones get no credit until there is room.
    received_bytes: int = 512 * 1024 * 1024
    #: What all connections hold; then the slowest and largest of them end. 0 is a quarter of the memory.
    held_bytes: int = 0
    #: In which a message, once begun, must go on to arrive, at `MESSAGE_PACE` bytes a second at least.
    message_seconds: float = 60.0


class Allowance:
    """What one connection may still do of what its `Limits` allow. Its methods raise `ConnectionFault`.

    ``answers`` says how many answers the peer has had so far: each allows for some frames more.
    """

    __slots__ = ("_answers", "_answers_before", "_faults", "_idle_left", "_limits")

    def __init__(self, limits: Limits, answers: Callable[[], int]) -> None:
        self._limits, self._answers = limits, answers
        self._faults = self._answers_before = 0
        #: So many frames of no use may still come before the next sweep, and more for each answer since then.
        self._idle_left = limits.idle_frames

    def renew(self) -> None:
        """Begin to count anew."""
        self._faults = 0
        self._idle_left = self._limits.idle_frames
        self._answers_before = self._answers()

    def count_idle(self, frames: int = 1) -> None:
        """Frames that are of no use by themselves, or as much work. What is answered or left allows for some."""
        self._idle_left -= frames
        if self._idle_left < 0:
            answers = self._answers() - self._answers_before
            self._answers_before += answers
            self._idle_left += answers * self._limits.frames_per_answer
            if self._idle_left < 0:
                raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames without a use")

    def count_left(self) -> None:
        """The peer has left a stream. That is its right, and it said more for it than that."""
        self._idle_left += self._limits.frames_per_answer

    def count_fault(self) -> None:
        """A stream that ended early by a fault of the peer's."""
        self._faults += 1
        if self._faults > self._limits.faults:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many streams were reset")


class Turns:
    """Shared by connections; the event loop's.

    Spend what something costs by subtracting it from ``left_ns``, measured or estimated, and ask
    `is_over` once that is negative, which costs nothing until then.
    """

    def __init__(self) -> None:
        self._call_soon = asyncio.get_running_loop().call_soon
        self._create_future = asyncio.get_running_loop().create_future
        self.left_ns = BUDGET_NS
        self._since_ns = 0
        #: Whether the loop has turned since the budget was full.
        self._has_turned = False
        self._is_serving = False
        self._first: deque[Callable[[], object]] = deque()
        self._later: deque[Callable[[], object]] = deque()
        self._call_soon(self._turned)

    @property
    def is_crowded(self) -> bool:
        """Whether others wait who did not have a turn yet."""
        return bool(self._first)

    def begin(self) -> None:
        """Measure from here."""
        self._since_ns = perf_counter_ns()

    def spend(self) -> None:
        """Take what has passed since the last `begin` or `spend`."""
        now = perf_counter_ns()
        self.left_ns -= now - self._since_ns
        self._since_ns = now

    def is_over(self) -> bool:
        """Whether to `wait` for the next turn: to be asked when ``left_ns`` is negative."""
        if not self._has_turned:
            return True
        self._fill()
        return False

    def wait(self, go_on: Callable[[], object]) -> None:
        """Call ``go_on`` in the next turn, or in a later one."""
        self._first.append(go_on)
        self._serve_soon()

    def wait_again(self, go_on: Callable[[], object]) -> None:
        """The same behind all that did not have a turn yet."""
        self._later.append(go_on)
        self._serve_soon()

    async def task_turn(self) -> None:
        """Let a task wait for its turn."""
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
