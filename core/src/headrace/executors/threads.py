"""Between threads and the event loop: what wakes either, the calls of threads on the loop, work on a thread apart."""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from headrace.errors import InternalError, summary
from headrace.telemetry.pacing import paced

log = paced(__name__)

T = TypeVar("T")


class Wakeup:
    """Wakes one thread. A `wake` before `wait` is not lost."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Must not be called again before it has woken."""
        self._lock.release()

    def wait(self) -> None:
        """Sleep until woken."""
        self._lock.acquire()


class LoopWakeup:
    """Wakes an executor that lives on the event loop: `wake` is what it is made with."""

    __slots__ = ("wake",)

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake


class LoopMailbox:
    """Calls on ``loop`` what it is given, in order. However much comes before the loop looks, it wakes once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_waking = False

    def send(self, call: Callable[..., object], *arguments: object) -> bool:
        """Call soon, never before this returns. Any thread, the loop's too. False if the loop has ended."""
        self._waiting.append((call, arguments))
        if self._is_waking:
            return not self.loop.is_closed()
        self._is_waking = True
        loop = self.loop
        try:
            # On the loop's own thread it is awake, and need not be written to.
            (loop.call_soon if _get_running_loop() is loop else loop.call_soon_threadsafe)(self._call_waiting)
        except RuntimeError:
            if not loop.is_closed():
                raise
            return False
        return True

    def flush(self) -> None:
        """Call now what has been sent so far. On the loop, and never by what is called."""
        if self._waiting:
            self._call_waiting()

    def _call_waiting(self) -> None:
        self._is_waking = False  # first: whoever sends from here on wakes the loop again
        for _ in range(len(self._waiting)):  # what comes meanwhile has to let others through
            call, arguments = self._waiting.popleft()
            try:
                call(*arguments)
            except KeyboardInterrupt:
                self.send(_nothing)  # wakes the loop for those behind it, if it goes on
                raise
            except BaseException:
                log.exception("a call from a model's thread failed")


def _nothing() -> None:
    """What is sent for the sake of the wake-up."""


def side_by_side(works: Sequence[Callable[[], None]], name: str) -> None:
    """Do all ``works`` at once, each on a thread, and wait until all have ended; then raise what the first raised.

    Threads that never end do not keep the interpreter from exiting.
    """
    ends: list[Future[None]] = [Future() for _ in works]

    def run(work: Callable[[], None], end: Future[None]) -> None:
        try:
            work()
        except BaseException as error:  # SystemExit of a stranger is its error, too
            end.set_exception(error)
        else:
            end.set_result(None)

    for work, end in zip(works, ends, strict=True):
        threading.Thread(target=run, args=(work, end), name=name, daemon=True).start()
    wait(ends)
    for end in ends:
        end.result()


def apart(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Start ``work`` on a new thread ``name``; return the future of its result. Event loop only.

    For work that may never end: it takes no thread from other work, and neither the loop nor the interpreter waits for
    it when it exits.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # nobody can take it back

    def run() -> None:
        try:
            result.set_result(contained(work))
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(result)


def contained(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, where what is no `Exception` becomes an `InternalError`.

    For threads that work for the event loop: a `SystemExit` that is passed on to a task ends the loop, and a
    `CancelledError` looks like the task's own.
    """
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        log.error("a thread of the server ended by %s", summary(error), exc_info=error)
        raise InternalError(summary(error)) from error
