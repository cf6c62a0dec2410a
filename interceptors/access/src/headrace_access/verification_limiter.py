"""A limit on the verification of unknown tokens: one per turn of the event loop, and a share of its time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic_ns, thread_time_ns

from headrace import Unavailable

#: Unknown tokens may take 1/5 of the event loop's time, and 100 ms at once.
_SHARE, _BURST_NS = 5, 100_000_000
#: The maximum number of waiting tokens.
_MAX_WAITING = 256


class VerificationLimiter:
    """Limits the verification of unknown tokens to 1/5 of the event loop's time, and one token in each turn.

    So a flood of wrong tokens delays another caller by one verification at most. Event loop only.
    """

    def __init__(self, clock: Callable[[], int] = monotonic_ns, cpu: Callable[[], int] = thread_time_ns) -> None:
        self._clock, self._cpu = clock, cpu
        self._left_ns, self._counted_ns = _BURST_NS, clock()
        #: True if a token was verified in this turn, or will be in the next one.
        self.is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def begin(self) -> int:
        """Return the CPU time so far, in ns, for `end`. Raises `Unavailable` if the share is used up."""
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
        if len(self._waiting) >= _MAX_WAITING:
            raise _too_many()
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if future.cancelled() and future in self._waiting:
                self._waiting.remove(future)

    def _next(self) -> None:
        """Start another turn with the token that has waited longest."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)  # behind the task that waits for the future
                return
        self.is_taken = False


def _too_many() -> Unavailable:
    return Unavailable("too many unknown tokens arrive at once to verify them", retry_after_s=1)
