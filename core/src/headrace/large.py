"""Work that is too long for the event loop: read, packed and unpacked on a few threads.

What is small stays on the loop, where a hop would cost more than the work. Whoever meets something
large there raises `Large` before beginning it, and is called again by a thread of `LargeWork`. A
thread helps only as far as the interpreter's lock is given up: zlib and NumPy do so, parsers do not.
What parses therefore takes slices of about `SLICE_BYTES`, and between two of them the loop has its turn.
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

from headrace.errors import HeadraceError, InternalError, Unavailable
from headrace.trimming import trim

log = logging.getLogger(__name__)

T = TypeVar("T")

#: From here on a thread reads, prints or packs: about a millisecond of work.
LARGE_BYTES = 64 * 1024
#: What is parsed or printed in one go while the interpreter's lock is held.
SLICE_BYTES = 64 * 1024
#: Nothing is too large: what a thread of `LargeWork` may look at.
UNBOUNDED = 2**63
THREADS = 2
#: How long a thread of `LargeWork` keeps the interpreter's lock from the event loop, where it can help it. The
#: usual 5 ms are paid again for everything that the loop waits for.
SWITCH_S = 0.0005
#: Pieces of work that may wait for a thread. Each holds what was received, which is bounded elsewhere.
WAITING = 1024
#: How long nothing large was done before what it took goes back to the system.
QUIET_S = 1.0


class Large(Exception):
    """Raised in place of beginning what would hold the event loop up. The caller goes to `LargeWork`."""


def worded(error: Exception) -> HeadraceError:
    """``error``, or if it is not ours what a caller is told in its place; the log has it."""
    if isinstance(error, HeadraceError):
        return error
    log.error("a large request or answer failed", exc_info=error)
    return InternalError("the request failed inside the server; its log has the reason")


def slices(count: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield where each slice of ``count`` items begins and ends. Between two slices the event loop can run."""
    size = max(SLICE_BYTES // item_bytes, 1)
    for begin in range(0, count, size):
        yield begin, min(begin + size, count)


class LargeWork:
    """`THREADS` threads for what is large. Event loop only, one per server; the threads start when needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "headrace-large")
        self._count = 0
        self._giving_back: asyncio.TimerHandle | None = None

    def begin(
        self, work: Callable[[], T], done: Callable[[T | Exception], None], log_id: str = ""
    ) -> Callable[[], None]:
        """Let a thread call ``work``, and then the event loop ``done`` with what it returned or raised.

        Returns what cancels: then ``done`` is not called, and ``work`` is let go, unless it runs. Raises
        `Unavailable` if too much waits already, with ``log_id``, that of the request, in front.
        """
        if self._count >= WAITING:
            raise Unavailable(
                f"{log_id}{WAITING} large requests and answers wait to be read or packed, try again later"
            )
        self._count += 1
        if self._giving_back is not None:
            self._giving_back.cancel()
        job = _Job(asyncio.get_running_loop(), self._deliver, work, done)
        self._pool.submit(job)
        return job.cancel

    async def run(self, work: Callable[[], T], log_id: str = "") -> T:
        """What ``work`` returns, or raises, on a thread. Cancelled, and refused, as `begin` says."""
        future: asyncio.Future[T | Exception] = asyncio.get_running_loop().create_future()
        cancel = self.begin(work, partial(_settle, future), log_id)
        del work  # the job has it, and lets it go
        try:
            outcome = await future
        finally:
            cancel()
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                # Its traceback holds this frame: what was received would wait for the collector.
                del outcome, future
        return outcome

    def give_back_later(self) -> None:
        """Something large was held that no thread has worked on: what it leaves goes back like what work leaves."""
        if self._giving_back is not None:
            self._giving_back.cancel()
        if not self._count:
            self._giving_back = asyncio.get_running_loop().call_later(QUIET_S, self._give_back)

    def close(self) -> None:
        """No further work. What runs goes on, and is not heard."""
        if self._giving_back is not None:
            self._giving_back.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _deliver(self, job: _Job[T], outcome: T | Exception) -> None:
        self._count -= 1
        done, job.done = job.done, None
        if done is not None:
            done(outcome)
        del outcome, done  # an error that is raised on the way keeps the frames that called it, and with them this one
        self.give_back_later()

    def _give_back(self) -> None:
        together = threading.Barrier(THREADS)

        def give_back() -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(QUIET_S)  # so that every thread has one
            trim()

        with contextlib.suppress(RuntimeError):  # closed, while the last work ran
            for _ in range(THREADS):
                self._pool.submit(give_back)


def _settle(future: asyncio.Future[T | Exception], outcome: T | Exception) -> None:
    if not future.done():
        future.set_result(outcome)


class _Yielding:
    """While a thread works in it, threads that wait for the interpreter's lock are given it sooner."""

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
    """One piece of work. It holds nothing once it is cancelled or done, however long the queue holds it."""

    __slots__ = ("_deliver", "_loop", "_work", "done")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[_Job[T], Any], None],
        work: Callable[[], T],
        done: Callable[[T | Exception], None],
    ) -> None:
        self._loop, self._deliver = loop, deliver
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
                # Without the frames it came through, and their memory, which would wait for the collector.
                outcome = error.with_traceback(None)
                outcome.__context__ = None
            except Exception as error:
                outcome = error
        del work  # what was received is free before the loop hears of it
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._deliver, self, outcome)
        del outcome  # as an error keeps this frame

    def cancel(self) -> None:
        self._work = self.done = None
