"""Work that is too long for the event loop: reading, printing and packing on a few threads.

Small work stays on the loop, where a thread switch would cost more than the work. Code that finds large work there
raises `TooLargeForLoop`, and is called again by a thread of `OffLoopWork`.

A thread helps only while it releases the interpreter's lock: zlib and NumPy do, parsers do not. So parsers work in
slices of about `SLICE_BYTES`, and the loop can run between two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from headrace.errors import HeadraceError, InternalError, OutOfMemory, Unavailable
from headrace.memory_release import release_memory

log = logging.getLogger(__name__)

T = TypeVar("T")

#: From 64 KiB on, a thread reads, prints or packs: about 1 ms of work.
LARGE_BYTES = 64 * 1024
#: Parsed or printed in one piece, with the interpreter's lock held.
SLICE_BYTES = 64 * 1024
#: No limit: for a thread of `OffLoopWork`.
UNBOUNDED = 2**63
THREADS = 2
#: A thread of `OffLoopWork` holds the interpreter's lock for at most 0.5 ms while the event loop waits for it. Python's
#: default is 5 ms, for each time that the loop waits.
SWITCH_S = 0.0005
#: At most this many pieces of work wait for a thread. Each holds received bytes, which are limited elsewhere.
WAITING = 1024
#: Memory is returned to the system 1 s after the last large work.
QUIET_S = 1.0


class TooLargeForLoop(Exception):
    """Raised for work that would delay the event loop. The caller repeats it on a thread of `OffLoopWork`."""


def worded(error: Exception) -> HeadraceError:
    """Return ``error`` if it is a `HeadraceError`. Else log it and return the error for the caller."""
    if isinstance(error, HeadraceError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemory("the server has no memory for a large request or response", retry_after_s=1)
    log.error("a large request or answer failed", exc_info=error)
    return InternalError("the request failed inside the server; its log has the reason")


def slices(count: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each slice of ``count`` items. The event loop can run between two slices."""
    size = max(SLICE_BYTES // item_bytes, 1)
    for begin in range(0, count, size):
        yield begin, min(begin + size, count)


class OffLoopWork:
    """`THREADS` threads for large work. One per server; the threads start when needed. Event loop only."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "headrace-off-loop")
        self._count = 0
        #: Counts the bytes of ``begin``, less when the work is done. Raises `OutOfMemory` if there are too many.
        self.count: Callable[[int], None] = _count_nothing
        self._release_timer: asyncio.TimerHandle | None = None

    def begin(
        self, work: Callable[[], T], done: Callable[[T | Exception], None], log_id: str = "", size_bytes: int = 0
    ) -> Callable[[], None]:
        """Call ``work`` on a thread, then ``done`` with its result or exception on the event loop. Return a cancel
        function.

        After a cancel, ``done`` is not called, and ``work`` is dropped unless it runs. Raises `Unavailable` if too much
        work waits, with the request's ``log_id`` before the text, or if there is no memory for a thread, and what
        `count` raises for ``size_bytes``, which the work holds and nobody else counts.
        """
        if self._count >= WAITING:
            raise Unavailable(
                f"{log_id}{WAITING} large requests and answers wait to be read or packed, try again later"
            )
        if size_bytes:
            self.count(size_bytes)
        job = _Job(asyncio.get_running_loop(), self._deliver, work, done, size_bytes)
        self._count += 1
        if self._release_timer is not None:
            self._release_timer.cancel()
        try:
            self._pool.submit(job)
        except RuntimeError as error:  # a thread that starts later finds the job, without its work
            job.cancel()
            raise OutOfMemory(f"{log_id}no thread for a large request or response: {error}") from None
        return job.cancel

    async def run(self, work: Callable[[], T], log_id: str = "") -> T:
        """Return or raise the outcome of ``work``, on a thread. Cancelled and refused as in `begin`."""
        future: asyncio.Future[T | Exception] = asyncio.get_running_loop().create_future()
        cancel = self.begin(work, partial(_settle, future), log_id)
        del work  # only the job holds it, and drops it in time
        try:
            outcome = await future
        finally:
            cancel()
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                # Its traceback holds this frame, so the received bytes would stay until a garbage collection.
                del outcome, future
        return outcome

    def release_memory_later(self) -> None:
        """Return memory to the system after a quiet time: something large was freed outside of these threads."""
        if self._release_timer is not None:
            self._release_timer.cancel()
        if not self._count:
            self._release_timer = asyncio.get_running_loop().call_later(QUIET_S, self.release_memory)

    def close(self) -> None:
        """Start no more work. Results of running work are dropped."""
        if self._release_timer is not None:
            self._release_timer.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _deliver(self, job: _Job[T], outcome: T | Exception) -> None:
        self._count -= 1
        if job.size_bytes:
            self.count(-job.size_bytes)
        done, job.done = job.done, None
        if done is not None:
            done(outcome)
        del outcome, done  # the traceback of an error keeps the frames of its callers, including this one
        self.release_memory_later()

    def release_memory(self) -> None:
        """Return free memory to the system, by each of the threads."""
        together = threading.Barrier(THREADS)

        def release() -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(QUIET_S)  # so that each thread runs one
            release_memory()

        with contextlib.suppress(RuntimeError):  # closed while the last work ran
            for _ in range(THREADS):
                self._pool.submit(release)


def _count_nothing(size_bytes: int) -> None:
    """Do nothing: no bytes are counted."""


def _settle(future: asyncio.Future[T | Exception], outcome: T | Exception) -> None:
    if not future.done():
        future.set_result(outcome)


class _Yielding:
    """While a thread works in this context, threads that wait for the interpreter's lock get it sooner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._working:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, SWITCH_S))
            self._working += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._working -= 1
            if not self._working:
                sys.setswitchinterval(self._usual_s)


_yielding = _Yielding()


class _Job(Generic[T]):
    """One piece of work. It drops its references when it is cancelled or done, even while it is queued."""

    __slots__ = ("_deliver", "_loop", "_work", "done", "size_bytes")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[_Job[T], Any], None],
        work: Callable[[], T],
        done: Callable[[T | Exception], None],
        size_bytes: int,
    ) -> None:
        self._loop, self._deliver, self.size_bytes = loop, deliver, size_bytes
        self._work: Callable[[], T] | None = work
        self.done: Callable[[T | Exception], None] | None = done

    def __call__(self) -> None:
        work, self._work = self._work, None
        outcome: T | Exception | None = None
        if work is not None:
            try:
                with _yielding:
                    outcome = work()
            except HeadraceError as error:
                # Without its frames, whose memory would stay until a garbage collection.
                outcome = error.with_traceback(None)
                outcome.__context__ = None
            except Exception as error:
                outcome = error
        del work  # the received bytes are free before the loop gets the result
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._deliver, self, outcome)
        del outcome  # an error would keep this frame

    def cancel(self) -> None:
        self._work = self.done = None
