"""Asks a cache that may block: on threads, not for longer than a request should wait, and not while it fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeAlias

from headrace.caches.base import CachedResponse, ResponseCache
from headrace.errors import InvalidArgument, Unavailable, summary
from headrace.telemetry.pacing import paced

log = paced(__name__)

#: How long a request waits for a cache before its model is asked.
PATIENCE_S = 1.0
#: How long a cache that has failed is left alone.
REST_S = 1.0
#: Questions, and responses to keep, that may wait for a thread.
WAITING = 256

#: Takes what a cache has; an error if it could not say.
Found: TypeAlias = Callable[["CachedResponse | Exception | None"], None]


class RemoteCalls:
    """The threads that ask ``cache``. Event loop only; one per server."""

    def __init__(self, cache: ResponseCache, loop: asyncio.AbstractEventLoop) -> None:
        self._cache, self._loop = cache, loop
        self._pool = ThreadPoolExecutor(cache.threads, "headrace-cache")
        self._getting = self._putting = 0
        # A cache that is full may answer and keep nothing, so both are left alone by themselves.
        self._get_rests_until = self._put_rests_until = 0.0
        self._get_has_failed = self._put_has_failed = False

    def get(self, key: bytes, check: Callable[[CachedResponse], None], found: Found) -> bool:
        """Have ``found`` called with what the cache has under ``key``, soon; False if it is not asked now.

        ``check`` is called on the thread, and raises if that is not the answer of the model.
        """
        # Of one that has failed, one question tells whether it answers again: it may hang, and keep a thread.
        if monotonic() < self._get_rests_until or self._getting >= (1 if self._get_has_failed else WAITING):
            return False
        self._getting += 1
        waiting = _Question(self, found)
        self._pool.submit(self._get, key, check, waiting)
        return True

    def put(self, key: bytes, response: CachedResponse, failed: Callable[[Exception], None]) -> None:
        """Have the cache keep ``response``; nothing while it is left alone."""
        if self._get_has_failed or monotonic() < self._put_rests_until:
            return
        if self._putting >= WAITING:
            failed(Unavailable(f"{WAITING} responses wait for the response cache"))
            return
        self._putting += 1
        self._pool.submit(self._put, key, response, failed)

    def close(self) -> None:
        """No further question. Blocks while the cache is closed."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._cache.close()

    # ------------------------------------------------------------------ threads

    def _get(self, key: bytes, check: Callable[[CachedResponse], None], question: _Question) -> None:
        outcome: CachedResponse | Exception | None
        try:
            outcome = self._cache.get(key)
            if outcome is not None:
                check(outcome)
        except BaseException as error:  # a stranger's, and SystemExit is no better
            outcome = _plain(error)
        self._tell(self._got, question, outcome)

    def _put(self, key: bytes, response: CachedResponse, failed: Callable[[Exception], None]) -> None:
        outcome: Exception | None = None
        try:
            self._cache.put(key, response)
        except BaseException as error:
            outcome = _plain(error)
        self._tell(self._has_put, failed, outcome)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(call, *arguments)

    # ------------------------------------------------------------------ event loop

    def _got(self, question: _Question, outcome: CachedResponse | Exception | None) -> None:
        self._getting -= 1
        if isinstance(outcome, InvalidArgument):  # one entry is wrong: a miss, for which the cache is not left alone
            log.warning("response cache '%s' has an entry that is not used: %s", self._cache.name, outcome.message)
            self._note(None)
        else:
            self._note(outcome)
        question.settle(outcome)

    def _has_put(self, failed: Callable[[Exception], None], outcome: Exception | None) -> None:
        self._putting -= 1
        if outcome is not None:
            self._put_rests_until = monotonic() + REST_S
            if not (self._put_has_failed or self._get_has_failed):
                log.warning("response cache '%s' keeps no further answers: %s", self._cache.name, summary(outcome))
                self._put_has_failed = True
            failed(outcome)
        elif self._put_has_failed:
            log.info("response cache '%s' keeps answers again", self._cache.name)
            self._put_has_failed = False

    def timed_out(self, question: _Question) -> None:
        error = Unavailable(f"no answer within {PATIENCE_S:g} s")
        self._note(error)
        question.settle(error)

    def _note(self, outcome: object) -> None:
        if not isinstance(outcome, Exception):
            if self._get_has_failed:
                log.info("response cache '%s' answers again", self._cache.name)
            self._get_has_failed = False
            return
        self._get_rests_until = monotonic() + REST_S
        if not self._get_has_failed:  # what follows is counted, and said once
            log.warning("response cache '%s' failed, so models answer: %s", self._cache.name, summary(outcome))
        self._get_has_failed = True

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop


class _Question:
    """Somebody who waits for the cache, until it answers or his patience is over."""

    __slots__ = ("_found", "_timer")

    def __init__(self, calls: RemoteCalls, found: Found) -> None:
        self._found: Found | None = found
        self._timer = calls.loop.call_later(PATIENCE_S, calls.timed_out, self)

    def settle(self, outcome: CachedResponse | Exception | None) -> None:
        found, self._found = self._found, None
        self._timer.cancel()
        if found is not None:
            found(outcome)


def _plain(error: BaseException) -> Exception:
    """``error`` without the frames that it came through, and what they hold."""
    error = error.with_traceback(None)
    return error if isinstance(error, Exception) else Unavailable(summary(error))
