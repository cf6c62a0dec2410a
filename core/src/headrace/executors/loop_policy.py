"""Decide whether the event loop or its thread runs the next execution of an instance, by the last durations.

A thread that is woken, and contends with the loop for the interpreter's lock, costs about as much as an execution of
`SHORT_NS`. A longer execution on the loop delays other requests, so it is worth a thread.
"""

from __future__ import annotations

import os

#: Executions that are judged together.
WINDOW = 16
#: An instance moves to the loop if the fastest quarter of a window takes at most this long. On a thread, the other
#: executions may have waited for the interpreter's lock.
SHORT_NS = 200_000
#: It moves back to the thread when half of a window takes longer. The gap between the two figures keeps it from moving
#: back and forth on a busy machine, where everything takes longer.
SLOW_NS = 2 * SHORT_NS
#: After one longer execution on the loop, the instance moves to its thread.
LONG_NS = 1_000_000
#: An instance with a longer execution in its last window does not move to the loop.
BLOCKED_NS = 5_000_000
#: All instances together may use 1 / `SHARE` of the loop's time.
SHARE = 2
#: An instance stays off the loop for at least 0.2 s, at most 600 s, and 100 times the execution that was too long.
AWAY_NS, MOST_AWAY_NS, AWAY_TIMES = 200_000_000, 600_000_000_000, 100


class LoopTime:
    """The time that one event loop has spent on executions. Create it on the loop's thread."""

    __slots__ = ("_schedstat", "spent_ns")

    def __init__(self) -> None:
        #: Event loop only.
        self.spent_ns = 0
        try:
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not Linux, or a kernel without this statistic
            self._schedstat = -1

    def core_wait_ns(self) -> int:
        """Return how long the loop's thread has waited for a core since it started, in ns. Any thread.

        It waits when it is preempted, or when a CPU quota is used up. 0 where the kernel does not count that.
        """
        return int(os.pread(self._schedstat, 64, 0).split()[1]) if self._schedstat >= 0 else 0

    def __del__(self) -> None:
        if self._schedstat >= 0:
            os.close(self._schedstat)


class LoopPolicy:
    """Gets the duration of every execution of one instance, and decides where the next one runs.

    ``loop_time`` is shared by all instances of the loop. If they use too much of it together, the first one that runs
    then moves to its thread.

    After a long execution, the instance stays away 100 times as long, so that the loop is late for at most 1 % of the
    time. If it was on the loop for less time than it had been away before, it stays away twice as long as before. Time
    that an execution on the loop waited for a core does not count.
    """

    __slots__ = (
        "_away_ns", "_began_ns", "_came_ns", "_free_ns", "_loop_time", "_spent_ns", "_took", "_waited_ns", "on_loop",
    )  # fmt: skip

    def __init__(self, loop_time: LoopTime) -> None:
        self.on_loop = False
        self._loop_time = loop_time
        self._took: list[int] = []
        #: The start of the first one, and ``loop_time.spent_ns`` at that time.
        self._began_ns = self._spent_ns = 0
        #: When it moved to the loop; the earliest time to move there again; and how long it has been away.
        self._came_ns = self._free_ns = self._away_ns = 0
        #: `LoopTime.core_wait_ns` at the start of the window on the loop, or at the last call.
        self._waited_ns = 0

    def ran(self, start_ns: int, end_ns: int) -> bool:
        """Count one execution, on the loop if `on_loop`. Return True if the loop runs the next one."""
        took, took_ns = self._took, end_ns - start_ns
        if not took:
            self._began_ns, self._spent_ns = start_ns, self._loop_time.spent_ns
        if self.on_loop:
            if took_ns > LONG_NS:
                took_ns = max(0, took_ns - self._waited_for_core())
            self._loop_time.spent_ns += took_ns
            if took_ns > LONG_NS:
                return self._move_off(end_ns, took_ns)
        took.append(took_ns)
        if len(took) < WINDOW:
            return self.on_loop
        took.sort()
        if not self.on_loop:
            if took[WINDOW // 4 - 1] <= SHORT_NS and took[-1] <= BLOCKED_NS and end_ns >= self._free_ns:
                self.on_loop, self._came_ns = True, end_ns
                self._waited_for_core()
        elif (
            took[WINDOW // 2 - 1] > SLOW_NS
            or (self._loop_time.spent_ns - self._spent_ns) * SHARE > end_ns - self._began_ns
        ):
            return self._move_off(end_ns, took[-1])
        else:
            self._waited_for_core()
        took.clear()
        return self.on_loop

    def _waited_for_core(self) -> int:
        """Return how long the loop has waited for a core since the last call, in ns."""
        before_ns, self._waited_ns = self._waited_ns, self._loop_time.core_wait_ns()
        return self._waited_ns - before_ns

    def _move_off(self, now_ns: int, took_ns: int) -> bool:
        away_ns = max(AWAY_NS, took_ns * AWAY_TIMES)
        if now_ns - self._came_ns < self._away_ns:
            away_ns = max(away_ns, 2 * self._away_ns)
        self._away_ns = min(away_ns, MOST_AWAY_NS)
        self._free_ns = now_ns + self._away_ns
        self._took.clear()
        self.on_loop = False
        return False
