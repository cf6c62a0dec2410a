"""When unknown tokens are verified: one in each turn of the event loop, and within a share of its time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic_ns, thread_time_ns

from headrace import Unavailable

#: Unknown tokens may take this share of the event loop's time, and 100 ms at once.
_SHARE, _BURST_NS = 5, 100_000_000
#: So many unknown tokens wait for their turn.
_MOST_WAITING = 256


class VerificationPace:
    """Lets the verification of unknown tokens take at most a fifth of the event loop's time, one token in each turn.

    So a flood of wrong tokens delays other callers by one verification at a time. Event loop only.
    """

    def __init__(self, clock: Callable[[], int] = monotonic_ns, cpu: Callable[[], int] = thread_time_ns) -> None:
        self._clock, self._cpu = clock, cpu
        self._left_ns, self._counted_ns = _BURST_NS, clock()
        #: True if a token was verified in this turn, or will be in the next one.
        self.is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def begin(self) -> int:
        """Return the CPU time so far. Raises `Unavailable` if too much was taken."""
        now_ns = self._clock()
        self._left_ns = min(_BURST_NS, self._left_ns + (now_ns - self._counted_ns) // _SHARE)
        self._counted_ns = now_ns
        if self._left_ns <= 0:
            raise _too_many()
        if not self.is_taken:
            try:
                asyncio.get_running_loop().call_soon(self._next)
            except RuntimeError:  # a command verifies a token
                pass
            else:
                self.is_taken = True
        return self._cpu()

    def end(self, begun_ns: int) -> None:
        self._left_ns -= self._cpu() - begun_ns

    async def turn(self) -> None:
        """Wait until no other token is verified in this turn of the event loop. Raises `Unavailable` if many wait."""
        if not self.is_taken:
            return
        if len(self._waiting) >= _MOST_WAITING:
            raise _too_many()
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if future.cancelled() and future in self._waiting:
                self._waiting.remove(future)

    def _next(self) -> None:
        """Begin another turn: the token that has waited longest is verified in it."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)  # behind the task that waits for the future
                return
        self.is_taken = False


def _too_many() -> Unavailable:
    return Unavailable("too many unknown tokens arrive at once to verify them", retry_after_s=1)
