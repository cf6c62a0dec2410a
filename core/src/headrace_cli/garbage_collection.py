"""Makes Python's garbage collections rare while the process answers requests.

Requests leave no cycles (tests/e2e/test_garbage.py); only models can. But Python starts a collection when several
hundred containers more have been made than freed, which 64 requests in flight exceed, and sometimes traverses all
objects. This policy does not switch the collector off:

- Automatic collections become rarer while they find nothing.
- Objects made by starting and loading are frozen, so that collections do not traverse them.
- All objects, the frozen ones included, are collected when the process is idle or when memory has grown.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from math import inf
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any

from headrace.hookspecs import hookimpl
from headrace.memory_release import release_left_heaps, release_memory

if TYPE_CHECKING:
    from headrace.models.served import ServedModel

#: The largest threshold of automatic collections: containers made and not freed.
MOST = 50_000
#: If two collections that find nothing are less than this apart, the threshold is doubled.
OFTEN_S = 0.25
#: Interval of the checks; the process is idle if it used less than this share of a core since the last check.
TICK_S, IDLE_SHARE = 0.25, 0.02
#: Longest time until the objects of an unloaded model are collected, if the process is not idle before.
PATIENCE_S = 10.0
#: A full automatic collection that takes longer than this freezes the objects that survived it.
LONG_S = 0.002
#: Collect when memory has grown by this many bytes, or by this share of the total, whichever is more.
GROWTH_BYTES, GROWTH_SHARE = 256 << 20, 0.25
#: When memory has grown or shrunk by this much, and the process is idle, free memory is returned to the system.
TRIM_BYTES = 16 << 20


class CollectionPolicy:
    """The policy of the whole process. Make, start and close it on the event loop; its hooks may run on any thread.

    If other code sets another threshold or disables the collector, the policy does not change that.
    ``resident_bytes`` returns the memory of the process, or 0 if it is unknown: then the threshold stays as it is.
    ``held_bytes`` returns what requests and responses hold of it: that is no garbage. Both clocks are in seconds;
    ``process_time`` is the CPU time of all threads.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        resident_bytes: Callable[[], int] | None = None,
        clock: Callable[[], float] = monotonic,
        process_time: Callable[[], float] = process_time,
        held_bytes: Callable[[], int] = int,
    ) -> None:
        self._loop, self._clock, self._process_time = loop, clock, process_time
        self._resident_bytes, self._held_bytes = resident_bytes or _resident_bytes, held_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._threshold = self._usual = gc.get_threshold()[0]
        self._may_wait = False
        self._limit_bytes: float = 0
        #: The memory after the last trim.
        self._trimmed_bytes = 0
        #: When all objects, frozen ones included, must be collected at the latest; earlier if the process is idle.
        self._due: float | None = None
        #: True if a whole interval has passed since the collection became due: the load or unload has ended.
        self._is_settled = True
        self._is_collecting = False
        self._used_s = self._ended = self._began = 0.0

    # ------------------------------------------------------------------ event loop

    def rest(self) -> None:
        """Collect rarely until `start`: loads make objects that stay, and not much garbage."""
        self._wait_for(MOST)

    def start(self) -> None:
        """Collect and freeze all objects, and begin the checks."""
        self._wait_for(self._usual)
        due = self._due
        self.collect_all()
        self._due = due  # an unloaded model may still be referenced
        self._may_wait = self._limit_bytes > 0
        gc.callbacks.append(self._collection_seen)
        self._used_s = self._process_time()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def close(self) -> None:
        """Restore the threshold of the collector. Frozen objects stay frozen."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._collection_seen)
            self._wait_for(self._usual)

    def collect_all(self) -> None:
        """Collect all objects, frozen ones included, return memory to the system, and freeze the survivors.

        Blocks all threads: 10 to 30 ms for each 50,000 objects. A server with one engine has about that many.
        """
        self._due, self._is_collecting = None, True
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._is_collecting = False
        release_memory()
        # No daemon: it starts threads, and CPython 3.11 may crash if a thread begins while the interpreter exits.
        threading.Thread(target=release_left_heaps, name="headrace-release").start()
        self._expect(self._other_bytes())

    def tick(self) -> None:
        """Collect if it is due and the process is idle, if the latest time is reached, or if memory has grown."""
        used_s = self._process_time()
        is_idle, self._used_s = used_s - self._used_s < TICK_S * IDLE_SHARE, used_s
        is_settled, self._is_settled = self._is_settled, True
        if self._due is not None and ((is_idle and is_settled) or self._clock() >= self._due):
            self.collect_all()
            return
        resident_bytes = self._resident_bytes()
        if 0 < self._limit_bytes < resident_bytes - self._held_bytes():
            gc.collect()
            if self._other_bytes() > self._limit_bytes:
                self.collect_all()
        elif is_idle and abs(resident_bytes - self._trimmed_bytes) > TRIM_BYTES:
            release_memory()  # memory that large requests have freed
            self._trimmed_bytes = self._resident_bytes()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self.tick()

    def _other_bytes(self) -> int:
        """Return the memory that may be garbage; 0 if it is unknown."""
        resident_bytes = self._resident_bytes()
        return resident_bytes and max(1, resident_bytes - self._held_bytes())

    def _expect(self, other_bytes: int) -> None:
        self._limit_bytes = other_bytes and other_bytes + max(GROWTH_BYTES, other_bytes * GROWTH_SHARE)

    # ------------------------------------------------------------------ any thread

    @hookimpl
    def model_loaded(self, model: ServedModel) -> None:
        """Freeze the objects made by the load. Its temporary objects are collected when the process is idle."""
        if self._timer is not None:
            gc.freeze()
            self._note(inf)

    @hookimpl
    def model_unloaded(self, model: ServedModel) -> None:
        """Note that a collection is due: classes and functions of a model are cycles, and may hold much memory."""
        self._note(self._clock() + PATIENCE_S)

    def _collection_seen(self, phase: str, info: dict[str, Any]) -> None:
        """Adapt the threshold. Python calls this before and after each collection, on the thread that started it."""
        now = self._clock()
        if phase == "start":
            self._began = now
            return
        before, self._ended = self._ended, now
        if info["collected"]:
            self._wait_for(self._usual)
        elif self._may_wait and now - before < OFTEN_S:
            self._wait_for(max(self._threshold, min(2 * self._threshold, MOST)))
        if info["generation"] == 2 and now - self._began > LONG_S and not self._is_collecting:
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
