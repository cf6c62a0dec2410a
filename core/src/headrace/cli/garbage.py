"""When Python's garbage collector runs in a process that serves: hardly ever while requests are answered.

Requests leave no cycles (tests/e2e/test_garbage.py), so what a collection looks for is what models make. Python starts
one whenever several hundred containers more have been made than freed, which is fewer than 64 requests in flight are
made of, and now and then looks at everything that lives. Here nothing is switched off: automatic collections become
rarer as long as they find nothing, what starting and loading made is frozen, so that none looks at it, and all of it is
looked at when nobody is waiting, or when memory grows.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from math import inf
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any

from headrace.hookspecs import hookimpl
from headrace.trimming import trim

if TYPE_CHECKING:
    from headrace.models.served import ServedModel

#: Of so many containers at most, more made than freed, the next collection may have to wait.
MOST = 50_000
#: Collections of nothing that come more often than this become rarer.
OFTEN_S = 0.25
#: How often memory is looked at; and of that time, what the process spends at most when it is idle.
TICK_S, IDLE_SHARE = 0.25, 0.02
#: How long what an unloaded model left waits for an idle moment.
PATIENCE_S = 10.0
#: A collection of all that is not frozen that takes longer freezes what it has seen to live.
LONG_S = 0.002
#: So much more memory is a reason to look; and a part of what there is.
GROWTH_BYTES, GROWTH_SHARE = 256 << 20, 0.25
#: When memory has grown or shrunk by so much, and the process is idle, what is free of it goes back to the system.
TRIM_BYTES = 16 << 20


class GarbagePolicy:
    """Decides for the whole process. Made, started and closed on the event loop; hears of models on any thread.

    It follows the interpreter: whoever sets another threshold, or disables the collector, is left alone.
    ``resident_bytes`` says how much memory the process has, or 0 if that is not known; then collections stay as
    frequent as they are. Both clocks are in seconds, ``process_time`` that of all threads.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        resident_bytes: Callable[[], int] | None = None,
        clock: Callable[[], float] = monotonic,
        process_time: Callable[[], float] = process_time,
    ) -> None:
        self._loop, self._clock, self._process_time = loop, clock, process_time
        self._resident_bytes = resident_bytes or _resident_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._threshold = self._usual = gc.get_threshold()[0]
        self._may_wait = False
        self._limit_bytes: float = 0
        #: The memory after the last trim.
        self._trimmed_bytes = 0
        #: By when all is to be looked at, frozen or not: as soon as the process is idle, if not before.
        self._due: float | None = None
        #: Whether it has been due for a while: who said so is through.
        self._is_settled = True
        self._is_looking = False
        self._used_s = self._ended = self._began = 0.0

    # ------------------------------------------------------------------ event loop

    def start(self) -> None:
        """What is there now stays: freeze it, and look at it again only when something is unloaded, or memory grows."""
        due = self._due
        self.look()
        self._due = due  # by a model that may not have been let go of yet
        self._may_wait = self._limit_bytes > 0
        gc.callbacks.append(self._heard)
        self._used_s = self._process_time()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def close(self) -> None:
        """The collector is as it was, but that what is frozen stays so."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._heard)
            self._wait_for(self._usual)

    def look(self) -> None:
        """Look at everything, frozen or not, give its memory back, and freeze what lives. Holds all threads up: 10
        to 30 ms for each 50,000 objects, which is what a server with one engine has."""
        self._due, self._is_looking = None, True
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._is_looking = False
        trim()
        self._expect(self._resident_bytes())

    def tick(self) -> None:
        """Look at everything if that is due and nobody waits, or if it is high time, or if memory has grown."""
        used_s = self._process_time()
        is_idle, self._used_s = used_s - self._used_s < TICK_S * IDLE_SHARE, used_s
        is_settled, self._is_settled = self._is_settled, True
        if self._due is not None and ((is_idle and is_settled) or self._clock() >= self._due):
            self.look()
            return
        resident_bytes = self._resident_bytes()
        if 0 < self._limit_bytes < resident_bytes:
            gc.collect()
            if self._resident_bytes() > self._limit_bytes:
                self.look()
        elif is_idle and abs(resident_bytes - self._trimmed_bytes) > TRIM_BYTES:
            trim()  # what large requests took, or have freed
            self._trimmed_bytes = self._resident_bytes()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self.tick()

    def _expect(self, resident_bytes: int) -> None:
        self._limit_bytes = resident_bytes and resident_bytes + max(GROWTH_BYTES, resident_bytes * GROWTH_SHARE)

    # ------------------------------------------------------------------ any thread

    @hookimpl
    def model_loaded(self, model: ServedModel) -> None:
        """What loading made stays, too. What it made for a moment waits for an idle one."""
        if self._timer is not None:
            gc.freeze()
            self._note(inf)

    @hookimpl
    def model_unloaded(self, model: ServedModel) -> None:
        """A model's own classes and functions are cycles, and may hold as much memory as its module did."""
        self._note(self._clock() + PATIENCE_S)

    def _heard(self, phase: str, info: dict[str, Any]) -> None:
        """Before and after each collection, on the thread that happened to start it."""
        now = self._clock()
        if phase == "start":
            self._began = now
            return
        before, self._ended = self._ended, now
        if info["collected"]:
            self._wait_for(self._usual)
        elif self._may_wait and now - before < OFTEN_S:
            self._wait_for(max(self._threshold, min(2 * self._threshold, MOST)))
        if info["generation"] == 2 and now - self._began > LONG_S and not self._is_looking:
            gc.freeze()
            self._note(inf)

    def _note(self, due: float) -> None:
        self._due, self._is_settled = min(due, inf if self._due is None else self._due), False

    def _wait_for(self, count: int) -> None:
        threshold, *others = gc.get_threshold()
        if threshold == self._threshold:
            self._threshold = count
            gc.set_threshold(count, *others)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123 (four times a second)
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
