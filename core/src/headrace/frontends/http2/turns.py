"""How much of one turn of the event loop the connections of a host may take together.

Frames are cheap to send and less cheap to read: one socket can hand over as many in a turn as cost
half a second, and a hundred sockets a hundred times that. So the connections share a budget. What
comes when it is spent waits for the next turn of the loop, unread in its socket; whoever did not
have a turn yet goes before those who want to go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

#: Of one turn of the loop. What is under way then is finished first, which takes about a millisecond.
BUDGET_NS = 2_500_000
#: Of it, what those who only want to go on leave to what arrives in this turn.
_RESERVED_NS = BUDGET_NS // 2
#: What a waiting task takes of a turn when it is woken.
_TASK_NS = 50_000


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
