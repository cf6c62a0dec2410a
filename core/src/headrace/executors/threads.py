"""Between threads and the event loop: wakeups, calls from threads on the loop, and work on threads of its own."""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from headrace.errors import InternalError, summary
from headrace.telemetry.log_limits import rate_limited_logger
from headrace.telemetry.log_output import clear_thread_model

log = rate_limited_logger(__name__)

T = TypeVar("T")

#: A thread waits this many seconds for more work.
_IDLE_S = 1.0


class Wakeup:
    """Wakes one thread. A `wake` before `wait` is not lost."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Wake the thread. Do not call this again before it has woken."""
        self._lock.release()

    def wait(self) -> None:
        """Sleep until woken."""
        self._lock.acquire()


class LoopWakeup:
    """Wakes an executor on the event loop by calling ``wake``."""

    __slots__ = ("wake",)

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake


class LoopMailbox:
    """Makes calls on ``loop``, in order. One wake-up serves all calls that are sent before the loop runs them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_waking = False

    def send(self, call: Callable[..., object], *arguments: object) -> bool:
        """Call soon, never before this returns. Any thread, also the loop's. Return False if the loop has ended."""
        self._waiting.append((call, arguments))
        if self._is_waking:
            return not self.loop.is_closed()
        self._is_waking = True
        loop = self.loop
        try:
            # The loop's own thread is awake and needs no wake-up.
            (loop.call_soon if _get_running_loop() is loop else loop.call_soon_threadsafe)(self._call_waiting)
        except RuntimeError:
            if not loop.is_closed():
                raise
            return False
        return True

    def flush(self) -> None:
        """Make the calls that were sent so far. On the loop only, and never from such a call."""
        if self._waiting:
            self._call_waiting()

    def _call_waiting(self) -> None:
        self._is_waking = False  # first: a send from here on wakes the loop again
        for _ in range(len(self._waiting)):  # calls that arrive meanwhile wait for the next turn
            call, arguments = self._waiting.popleft()
            try:
                call(*arguments)
            except KeyboardInterrupt:
                self.send(_nothing)  # wakes the loop for the remaining calls, if it goes on
                raise
            except BaseException:
                log.exception("a call from a model's thread failed")


def _nothing() -> None:
    """Do nothing: sent only for its wake-up."""


class _Worker:
    """A thread for ``work``. If ``is_reused``, it then waits `_IDLE_S` for more, and is the next to be started."""

    def __init__(self, work: Callable[[], None], name: str, is_reused: bool) -> None:
        #: The call that the thread makes when its work has ended.
        self.then: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._work: Callable[[], None] | None = work
        self._is_reused = is_reused
        self._has_work = threading.Lock()
        self._has_work.acquire()

    def give(self, work: Callable[[], None], name: str, is_reused: bool) -> None:
        self.thread.name, self._work, self._is_reused = name, work, is_reused
        self._has_work.release()

    def _main(self) -> None:
        _local.worker = self
        while (work := self._work) is not None:
            self._work = None
            work()
            del work  # free its objects while this thread waits
            if self.then is not None:
                self.then()
            elif self._is_reused:
                clear_thread_model()
                self._wait_for_work()

    def _wait_for_work(self) -> None:
        _idle.append(self)
        if not self._has_work.acquire(timeout=_IDLE_S):
            try:
                _idle.remove(self)
            except ValueError:  # it has just been chosen
                self._has_work.acquire()


#: Threads that wait for work.
_idle: list[_Worker] = []
_local = threading.local()


def started(work: Callable[[], T], name: str, *, is_reused: bool = False) -> Future[T]:
    """Start ``work`` on a thread ``name``, and return the future of its result. It is as for `run_on_thread`."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # it cannot be cancelled

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # SystemExit of a plugin is its error, too
            result.set_exception(error)

    try:
        worker = _idle.pop()
    except IndexError:
        _Worker(run, name, is_reused).thread.start()
    else:
        worker.give(run, name, is_reused)
    return result


def continue_with(then: Callable[[], None]) -> threading.Thread | None:
    """Make this thread call ``then`` when its work has ended. Return the thread.

    Return None if it is no thread of `run_on_thread` or `run_in_parallel`, or has another continuation.
    """
    worker: _Worker | None = getattr(_local, "worker", None)
    if worker is None or worker.then is not None:
        return None
    worker.then = then
    return worker.thread


def run_in_parallel(works: Sequence[Callable[[], None]], name: str) -> None:
    """Run all ``works`` at the same time, each on a thread, and wait for all. Then raise the error of the first.

    Threads that never end do not keep the interpreter from exiting.
    """
    if len(works) == 1:  # this thread would only wait
        works[0]()
        return
    ends = [started(work, name) for work in works]
    wait(ends)
    for end in ends:
        end.result()


def run_on_thread(work: Callable[[], T], name: str, *, is_reused: bool = False) -> asyncio.Future[T]:
    """Start ``work`` on a thread ``name``; return the future of its result. Event loop only.

    For work that may never end: it takes no thread from other work, and neither the loop nor the interpreter waits for
    it when it exits. If ``is_reused``, the thread may do other work afterwards, so ``work`` must leave nothing in it.
    """
    return asyncio.wrap_future(started(partial(contained, work), name, is_reused=is_reused))


def contained(work: Callable[[], T]) -> T:
    """Return the result of ``work``. Turn an exception that is no `Exception` into an `InternalError`.

    For threads that work for the event loop: a `SystemExit` that reaches a task ends the loop, and a task would take a
    `CancelledError` for its own.
    """
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        log.error("a thread of the server ended by %s", summary(error), exc_info=error)
        raise InternalError(summary(error)) from error
