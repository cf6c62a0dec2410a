"""Whether the event loop or its thread runs the next execution of an instance: arithmetic on how long the last took.

A thread that is woken, and contends with the loop for the interpreter's lock, costs about as much as an execution of
`SHORT_NS`. Whatever takes longer on the loop has others wait, so it is worth a thread.
"""

from __future__ import annotations

#: Executions that are looked at together.
WINDOW = 16
#: What is worth no thread: an instance comes to the loop if the fastest quarter of its executions take no longer, and
#: leaves it when half of them do. On a thread the others may have waited for the interpreter's lock.
SHORT_NS = 200_000
#: An execution on the loop that takes longer is its last there for a while.
LONG_NS = 1_000_000
#: An instance that has blocked for so long in its last window does not come.
BLOCKED_NS = 5_000_000
#: Of its time, the loop may spend one part in so many on executions, all instances together.
SHARE = 2
#: How long an instance stays away, at least; at most; and how many times as long as its execution took.
AWAY_NS, MOST_AWAY_NS, AWAY_TIMES = 200_000_000, 600_000_000_000, 100


class LoopTime:
    """What an event loop has spent on executions. Event loop only."""

    __slots__ = ("spent_ns",)

    def __init__(self) -> None:
        self.spent_ns = 0


class LoopPolicy:
    """Hears of every execution of one instance, one at a time, and says where the next one runs.

    ``loop_time`` is shared by all instances of the loop: the one that finds first that they take too much of it leaves.
    What was long stays away a hundred times as long, so that the loop is late for a hundredth of the time at most; and
    twice as long as before if it did not stay on the loop for as long as it had been away.
    """

    __slots__ = ("_away_ns", "_began_ns", "_came_ns", "_free_ns", "_loop_time", "_spent_ns", "_took", "on_loop")

    def __init__(self, loop_time: LoopTime) -> None:
        self.on_loop = False
        self._loop_time = loop_time
        self._took: list[int] = []
        #: When the first of them began, and what the loop had spent by then.
        self._began_ns = self._spent_ns = 0
        #: When it came to the loop; before when it does not come back; and for how long it has been away.
        self._came_ns = self._free_ns = self._away_ns = 0

    def ran(self, start_ns: int, end_ns: int) -> bool:
        """An execution began and ended then, where `on_loop` says; whether the loop runs the next one."""
        took, took_ns = self._took, end_ns - start_ns
        if not took:
            self._began_ns, self._spent_ns = start_ns, self._loop_time.spent_ns
        if self.on_loop:
            self._loop_time.spent_ns += took_ns
            if took_ns > LONG_NS:
                return self._leave(end_ns, took_ns)
        took.append(took_ns)
        if len(took) < WINDOW:
            return self.on_loop
        took.sort()
        if not self.on_loop:
            if took[WINDOW // 4 - 1] <= SHORT_NS and took[-1] <= BLOCKED_NS and end_ns >= self._free_ns:
                self.on_loop, self._came_ns = True, end_ns
        elif (
            took[WINDOW // 2 - 1] > SHORT_NS
            or (self._loop_time.spent_ns - self._spent_ns) * SHARE > end_ns - self._began_ns
        ):
            return self._leave(end_ns, took[-1])
        took.clear()
        return self.on_loop

    def _leave(self, now_ns: int, took_ns: int) -> bool:
        away_ns = max(AWAY_NS, took_ns * AWAY_TIMES)
        if now_ns - self._came_ns < self._away_ns:
            away_ns = max(away_ns, 2 * self._away_ns)
        self._away_ns = min(away_ns, MOST_AWAY_NS)
        self._free_ns = now_ns + self._away_ns
        self._took.clear()
        self.on_loop = False
        return False
