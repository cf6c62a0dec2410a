"""The response cache: answer requests before they reach the scheduler of their model.

A request takes one of four ways:

- The cache has its response: it is answered at once.
- A request with the same content (the leader) is being executed: this one follows, and gets the leader's response.
- No such request is being executed: this one is the leader. It is executed, and its response is stored. If it fails
  or is cancelled, the first follower becomes the leader. After 2 failures, all followers are executed and not stored.
- It is executed and not stored: a request that bypasses the cache; a duplicate that comes from a model or has another
  priority; a large request while the digest threads are full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from headrace.caches.base import CachedResponse
from headrace.caches.kept_responses import content_bytes
from headrace.caches.keys import bypasses
from headrace.caches.model_cache import LARGE_BYTES, ModelCache
from headrace.errors import Cancelled, HeadraceError, InternalError, Unavailable, summary
from headrace.messages.request import LocatedRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import Clock, ScheduledModel, Scheduler
from headrace.schedulers.in_flight import AWAITED
from headrace.schedulers.instance_source import Limiter
from headrace.schedulers.model_queue import STOPPING, ModelQueue
from headrace.telemetry.statistics import ModelStatistics

#: After this many failed executions, each follower is executed by itself instead of one after the other.
_ATTEMPTS = 2


class SingleFlight:
    """A key whose response is pending, from an execution (``leader``) or from a remote cache (``leader`` is None).

    ``followers`` wait for it in order of arrival. Each has the time at which it was submitted. ``lookup_ns`` is the
    time from the request of the leader to the start of its execution.
    """

    __slots__ = (
        "answer",
        "failures",
        "followers",
        "is_choosing",
        "key",
        "leader",
        "lookup_ns",
        "priority",
        "responses",
    )

    def __init__(self, key: bytes, priority: int) -> None:
        self.key, self.priority = key, priority
        self.leader: Ticket | None = None
        self.followers: dict[Ticket, int] = {}
        self.answer: Answer = None
        self.responses = self.failures = self.lookup_ns = 0
        self.is_choosing = False


class CachingModelQueue(ModelQueue):
    """The model queue of a version whose responses are stored in ``cache``. Event loop only, like `ModelQueue`."""

    def __init__(
        self,
        kind: type[Scheduler],
        model: ScheduledModel,
        statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
        cache: ModelCache,
        clock: Clock | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        super().__init__(kind, model, statistics, loop, clock, limiter)
        self._cache = cache
        statistics.has_cache, cache.failed = True, self._count_failure
        self._flights: dict[bytes, SingleFlight] = {}
        #: The flight that each waiting request waits for. None while a thread computes its key. The scheduler does not
        #: have these requests.
        self._waits_for: dict[Ticket, SingleFlight | None] = {}

    # ------------------------------------------------------------------ in

    def submit(self, ticket: Ticket, has_entered: bool = False) -> None:
        """Do as `ModelQueue.submit`. Also raises `InvalidArgument` if the parameter `BYPASS` is neither true nor
        false.

        ``has_entered`` is ignored: `_resume` passes it to the base class.
        """
        request = ticket.request
        if bypasses(request):
            super().submit(ticket)
            return
        if self._tracker.is_closing:
            raise self._closing(ticket)
        looked_up_ns = self._now_ns()
        if content_bytes(request.inputs.values()) <= LARGE_BYTES:  # type: ignore[arg-type]
            self._look_up(ticket, self._cache.keys.key(request), looked_up_ns, super().submit)
        elif self._cache.digest_on_thread(request, partial(self._digested, ticket, looked_up_ns)):
            self._wait(ticket, None, looked_up_ns)
        else:
            super().submit(ticket)

    def _digested(self, ticket: Ticket, looked_up_ns: int, key: bytes | Exception) -> None:
        """Go on with a request whose key has been computed."""
        if self._waits_for.pop(ticket, self) is self:
            return  # cancelled meanwhile
        if isinstance(key, Exception):
            self._count_failure(key)
            self._resume(ticket)
        else:
            self._look_up(ticket, key, looked_up_ns, self._resume)

    def _look_up(self, ticket: Ticket, key: bytes, looked_up_ns: int, execute: Callable[[Ticket], None]) -> None:
        """Answer ``ticket`` from the cache, let it follow a leader, or ``execute`` it."""
        request, flight = ticket.request, self._flights.get(key)
        if flight is not None:
            # A request from a model blocks an instance. It must not wait for a leader, because the leader may need
            # that instance. A request does not wait for one of another priority.
            if request.callers or request.priority != flight.priority:
                self._count_miss(self._now_ns() - looked_up_ns)
                execute(ticket)
            else:
                self._wait(ticket, flight, looked_up_ns)
            return
        if not self._cache.is_remote and (entry := self._cache.find(key)) is not None:
            self._open[ticket] = AWAITED
            self._hit(ticket, entry, looked_up_ns)
            return
        flight = self._flights[key] = SingleFlight(key, request.priority)
        if self._cache.is_remote and self._cache.ask(key, partial(self._found, flight)):
            self._wait(ticket, flight, looked_up_ns)
            return
        try:
            self._lead(flight, ticket, looked_up_ns, execute)
        except BaseException:
            self._flights.pop(key, None)
            raise

    def _wait(self, ticket: Ticket, flight: SingleFlight | None, looked_up_ns: int) -> None:
        self._open[ticket] = AWAITED
        ticket.queued_ns, ticket.on_cancel = looked_up_ns, self._cancel_follower
        self._waits_for[ticket] = flight
        if flight is not None:
            flight.followers[ticket] = looked_up_ns

    def _lead(self, flight: SingleFlight, ticket: Ticket, looked_up_ns: int, execute: Callable[[Ticket], None]) -> None:
        """Execute ``ticket`` for all requests that wait for ``flight``."""
        flight.leader, flight.lookup_ns = ticket, self._now_ns() - looked_up_ns
        if isinstance(ticket.request, LocatedRequest):  # its client may change an output that others are to get
            ticket.request = LocatedRequest.of(ticket.request, {}, None)
        watcher = partial(self._watch_leader, flight)
        ticket.watch(watcher)
        try:
            execute(ticket)
        except BaseException:
            flight.leader = None
            if ticket.watchers:
                ticket.watchers.remove(watcher)
            raise

    def _resume(self, ticket: Ticket) -> None:
        """Execute ``ticket``, which entered earlier: a refusal is its response."""
        try:
            super().submit(ticket, has_entered=True)
        except BaseException as error:
            ticket.on_cancel = None
            if isinstance(error, Unavailable):
                self.statistics.rejected.count += 1
            refusal = error if isinstance(error, HeadraceError) else InternalError(summary(error))
            self._tracker.answer(ticket, refusal)

    # ------------------------------------------------------------------ out

    def _watch_leader(self, flight: SingleFlight, leader: Ticket, answer: Answer, final: bool) -> Answer:
        """Record an answer to the leader of ``flight``. If it is the last one, answer the followers."""
        if isinstance(answer, InferResponse):
            flight.responses += 1
        if answer is not None and not isinstance(flight.answer, HeadraceError):
            flight.answer = answer
        if final:
            self._finish_leader(flight, leader)
        return answer

    def _finish_leader(self, flight: SingleFlight, leader: Ticket) -> None:
        answer, single = flight.answer, flight.responses == 1
        flight.leader, flight.answer, flight.responses = None, None, 0
        if isinstance(answer, InferResponse) and single:
            began_ns = self._now_ns()
            entry = self._cache.keep(flight.key, answer)
            self._count_miss(flight.lookup_ns + self._now_ns() - began_ns)
            self._answer_followers(flight, entry)
            return
        self._count_miss(flight.lookup_ns)
        flight.failures += not leader.cancelled
        self._choose_leader(flight)

    def _found(self, flight: SingleFlight, result: CachedResponse | Exception | None) -> None:
        """Use the response of the remote cache; without one, execute the first follower."""
        if isinstance(result, CachedResponse):
            self._answer_followers(flight, result)
        else:
            self._choose_leader(flight)

    def _answer_followers(self, flight: SingleFlight, entry: CachedResponse) -> None:
        """Answer all requests that wait for ``flight``."""
        self._flights.pop(flight.key, None)
        for ticket, looked_up_ns in tuple(flight.followers.items()):
            if self._waits_for.pop(ticket, self) is not self:
                self._hit(ticket, entry, looked_up_ns)

    def _choose_leader(self, flight: SingleFlight) -> None:
        """Execute the first follower of ``flight``, which has no leader now. After `_ATTEMPTS` failures, execute them
        all."""
        if flight.is_choosing:  # already in the loop below, which takes the next follower
            return
        flight.is_choosing = True
        while flight.followers and flight.leader is None:
            ticket, looked_up_ns = next(iter(flight.followers.items()))
            del flight.followers[ticket], self._waits_for[ticket]
            if flight.failures < _ATTEMPTS:
                self._lead(flight, ticket, looked_up_ns, self._resume)
            else:
                self._count_miss(self._now_ns() - looked_up_ns)
                self._resume(ticket)
        flight.is_choosing = False
        if flight.leader is None:
            self._flights.pop(flight.key, None)

    def _hit(self, ticket: Ticket, entry: CachedResponse, looked_up_ns: int) -> None:
        ticket.on_cancel = None
        self.statistics.record_hit(ticket.arrival_ns, looked_up_ns, self._now_ns())
        cache = self._cache
        self._tracker.answer(
            ticket, InferResponse(dict(entry.outputs), entry.parameters, cache.name, cache.version, ticket.request.id)
        )

    def _count_miss(self, took_ns: int) -> None:
        """Count a request that is executed, and the time of its look-up and of storing its response."""
        self.statistics.record_miss(took_ns)

    def _count_failure(self, error: Exception) -> None:
        self.statistics.cache_failures += 1

    # ------------------------------------------------------------------ cancellation and close

    def _cancel_follower(self, ticket: Ticket) -> None:
        """Answer a waiting request whose caller has cancelled it."""
        self._answer_follower(ticket, Cancelled(f"{ticket.request.log_id}request was cancelled"))

    def _answer_follower(self, ticket: Ticket, error: HeadraceError) -> None:
        flight = self._waits_for.pop(ticket, self)
        if flight is self:
            return
        if isinstance(flight, SingleFlight):
            del flight.followers[ticket]
        reason = self.statistics.cancelled if isinstance(error, Cancelled) else self.statistics.rejected
        reason.count += 1
        reason.ns += self._now_ns() - ticket.arrival_ns
        self.deliver((ticket,), (error,))

    def close(self) -> None:
        for ticket in tuple(self._waits_for):
            self._answer_follower(ticket, Unavailable(f"{ticket.request.log_id}{STOPPING}"))
        super().close()
