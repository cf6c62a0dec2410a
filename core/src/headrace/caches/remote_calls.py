"""Calls a cache that may block: on threads, with a timeout, and not for a while after it has failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeAlias

from headrace.caches.base import CachedResponse, ResponseCache
from headrace.errors import InvalidArgument, Unavailable, summary
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)

#: A request waits this long for the cache; then its model executes it.
TIMEOUT_S = 1.0
#: After a failure, the cache is not called for this long.
RETRY_S = 1.0
#: The most lookups, and the most responses to store, that are queued or running.
WAITING = 256

#: Called with the result of a lookup: a response, None, or the error of the cache.
LookUpDone: TypeAlias = Callable[["CachedResponse | Exception | None"], None]


class RemoteCalls:
    """Calls ``cache`` on threads. Event loop only; one per server."""

    def __init__(self, cache: ResponseCache, loop: asyncio.AbstractEventLoop) -> None:
        self._cache, self._loop = cache, loop
        self._pool = ThreadPoolExecutor(cache.threads, "headrace-cache")
        self._getting = self._putting = 0
        # Lookups and stores pause independently: a cache that is full may answer lookups and refuse to store.
        self._get_paused_until = self._put_paused_until = 0.0
        self._get_has_failed = self._put_has_failed = False

    def get(self, key: bytes, check: Callable[[CachedResponse], None], done: LookUpDone) -> bool:
        """Look up ``key``; ``done`` is called with the result. Return False if the cache is not called now.

        ``check`` is called with a response, on the thread. It raises if the model could not have sent it.
        """
        # After a failure, one lookup at a time shows whether the cache works again: it may hang and block a thread.
        if monotonic() < self._get_paused_until or self._getting >= (1 if self._get_has_failed else WAITING):
            return False
        self._getting += 1
        lookup = _Lookup(self, done)
        self._pool.submit(self._get, key, check, lookup)
        return True

    def put(self, key: bytes, response: CachedResponse, failed: Callable[[Exception], None]) -> None:
        """Store ``response``. Do nothing while the cache is paused after a failure."""
        if self._get_has_failed or monotonic() < self._put_paused_until:
            return
        if self._putting >= WAITING:
            failed(Unavailable(f"{WAITING} responses wait for the response cache"))
            return
        self._putting += 1
        self._pool.submit(self._put, key, response, failed)

    def close(self) -> None:
        """Drop all queued calls and close the cache. Blocks until it is closed."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._cache.close()

    # ------------------------------------------------------------------ threads

    def _get(self, key: bytes, check: Callable[[CachedResponse], None], lookup: _Lookup) -> None:
        outcome: CachedResponse | Exception | None
        try:
            outcome = self._cache.get(key)
            if outcome is not None:
                check(outcome)
        except BaseException as error:  # raised by the plugin's code; SystemExit must not end the thread, either
            outcome = _plain(error)
        self._call_soon(self._got, lookup, outcome)

    def _put(self, key: bytes, response: CachedResponse, failed: Callable[[Exception], None]) -> None:
        outcome: Exception | None = None
        try:
            self._cache.put(key, response)
        except BaseException as error:
            outcome = _plain(error)
        self._call_soon(self._has_put, failed, outcome)

    def _call_soon(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)

    # ------------------------------------------------------------------ event loop

    def _got(self, lookup: _Lookup, outcome: CachedResponse | Exception | None) -> None:
        self._getting -= 1
        if isinstance(outcome, InvalidArgument):  # one entry is wrong: a miss, after which the cache is not paused
            log.warning("response cache '%s' has an entry that is not used: %s", self._cache.name, outcome.message)
            self._note(None)
        else:
            self._note(outcome)
        lookup.settle(outcome)

    def _has_put(self, failed: Callable[[Exception], None], outcome: Exception | None) -> None:
        self._putting -= 1
        if outcome is not None:
            self._put_paused_until = monotonic() + RETRY_S
            if not (self._put_has_failed or self._get_has_failed):
                log.warning("response cache '%s' stores no further responses: %s", self._cache.name, summary(outcome))
                self._put_has_failed = True
            failed(outcome)
        elif self._put_has_failed:
            log.info("response cache '%s' stores responses again", self._cache.name)
            self._put_has_failed = False

    def timed_out(self, lookup: _Lookup) -> None:
        """Fail ``lookup``: the cache has not answered in time."""
        error = Unavailable(f"no answer within {TIMEOUT_S:g} s")
        self._note(error)
        lookup.settle(error)

    def _note(self, outcome: object) -> None:
        """Log when lookups start to fail and when they work again; pause them after a failure."""
        if not isinstance(outcome, Exception):
            if self._get_has_failed:
                log.info("response cache '%s' answers again", self._cache.name)
            self._get_has_failed = False
            return
        self._get_paused_until = monotonic() + RETRY_S
        if not self._get_has_failed:  # further failures are counted, and not logged
            log.warning("response cache '%s' failed, so models answer: %s", self._cache.name, summary(outcome))
        self._get_has_failed = True

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop


class _Lookup:
    """A request that waits for the cache, at most `TIMEOUT_S`."""

    __slots__ = ("_done", "_timer")

    def __init__(self, calls: RemoteCalls, done: LookUpDone) -> None:
        self._done: LookUpDone | None = done
        self._timer = calls.loop.call_later(TIMEOUT_S, calls.timed_out, self)

    def settle(self, outcome: CachedResponse | Exception | None) -> None:
        """Give ``outcome`` to the request, unless it has been given one."""
        done, self._done = self._done, None
        self._timer.cancel()
        if done is not None:
            done(outcome)


def _plain(error: BaseException) -> Exception:
    """Return ``error`` without its traceback, which would keep the variables of its frames alive."""
    error = error.with_traceback(None)
    return error if isinstance(error, Exception) else Unavailable(summary(error))
