"""The dynamic batcher: an idle instance pulls a batch (docs/spec/behaviours.md sections 6.2 and 6.3)."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns
from typing import ClassVar

from headrace.errors import Cancelled, HeadraceError, Unavailable
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.schedulers.base import Scheduler, SchedulerContext
from headrace.schedulers.batching import BatchRule, Decision, decide
from headrace.schedulers.flight import Flight
from headrace.schedulers.policy import Priorities
from headrace.schedulers.queue import RequestQueue
from headrace.telemetry.statistics import Duration
from headrace.workers.bell import Bell, LoopBell

_STOPPING = "Server is stopping"
#: What counts as so many rows arrived: news that every instance has to look at, however many it is missing.
_NEWS = 1 << 32


class DynamicScheduler(Scheduler):
    """Batches requests that wait together, under the config's ``dynamic_batching``."""

    name: ClassVar[str] = "dynamic_batching"

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self._rule = self.rule(context)
        self._priorities = Priorities.from_config(context.config)
        self._only_policy = self._priorities.policy(1) if self._priorities.levels == 1 else None
        self._queue = RequestQueue()
        config = context.config
        self._flight = Flight(config.dynamic_batching.preserve_ordering, config.model_transaction_policy.decoupled)
        self._statistics = context.statistics
        self._idle: deque[Bell | LoopBell] = deque()
        #: What joins the batch that is being formed arrives behind it, unless levels or postponed requests
        #: give it another place.
        self._joins_behind = self._only_policy is not None and not self._only_policy.postpones
        self._forming_key: object = None
        self._arrived_rows = 0
        self._is_waking = False
        self._call_soon = context.loop.call_soon
        self._closed = False

    def rule(self, context: SchedulerContext) -> BatchRule:
        """How requests join; other queue-based schedulers override this."""
        return BatchRule.from_config(context.config)

    # ------------------------------------------------------------------ event loop

    def submit(self, request: InferRequest) -> None:
        if self._flight.is_closing:
            raise Unavailable(
                f"{request.log_id}Server is stopping, scheduler for model has stopped accepting new inference requests"
            )
        level, policy = 1, self._only_policy
        if policy is None:
            level = self._priorities.level(request.priority)
            policy = self._priorities.policy(level)
        if policy.max_size and self._queue.size(level) >= policy.max_size:
            self._statistics.rejected.count += 1
            raise Unavailable(f"{request.log_id}Exceeds maximum queue size")
        request.queued_ns = monotonic_ns()
        if policy.default_timeout_ns:
            timeout_ns = policy.timeout_ns(request.timeout_us)
            request.deadline_ns = request.queued_ns + timeout_ns
            request.timer = self.context.loop.call_later(timeout_ns / 1e9, self._expire, request, level)
        request.on_cancel = self._cancel
        self._flight.enter(request)
        self._queue.add(request, level)
        self._announce(request)

    def progress(self, request: InferRequest, response: Answer) -> None:
        self._flight.progress(request, response)

    def deliver(self, requests: Sequence[InferRequest], answers: Sequence[Answer]) -> None:
        give = self._flight.answer
        for request, answer in zip(requests, answers, strict=True):
            if request.timer is not None:
                request.timer.cancel()
            give(request, answer)

    @property
    def in_flight(self) -> int:
        return self._flight.count

    @property
    def pending(self) -> int:
        return len(self._queue)

    def has_waiting(self, request: InferRequest) -> bool:
        return request in self._queue

    async def drain(self) -> None:
        await self._flight.close()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._wake_one()
        for request in self._queue.head(len(self._queue)):
            self._give_up(request, Unavailable(f"{request.log_id}{_STOPPING}"), self._statistics.rejected)

    def abandon(self) -> None:
        self.close()
        self._flight.abandon(_STOPPING)

    def _expire(self, request: InferRequest, level: int) -> None:
        """The request's time in the queue is over, whether or not an instance is free."""
        if not self._priorities.policy(level).postpones:
            error = Unavailable("Request timeout expired")
            self._give_up(request, error, self._statistics.rejected)
        elif self._queue.postpone(request, level):
            request.deadline_ns = 0
            self._look_again()

    def _cancel(self, request: InferRequest) -> None:
        self._give_up(request, Cancelled(f"{request.log_id}request was cancelled"), self._statistics.cancelled)

    def _give_up(self, request: InferRequest, error: HeadraceError, reason: Duration) -> None:
        """Answer a request that no instance will run; nothing if an instance has it already."""
        if not self._queue.remove(request):
            return
        reason.count += 1
        reason.ns += monotonic_ns() - request.arrival_ns
        self.deliver((request,), (error,))
        self._look_again()

    def poll(self, bell: LoopBell) -> list[InferRequest] | None:
        if self._closed:
            return None
        batch, decision = self._next()
        if batch:
            return batch
        if decision is None:
            bell.wake_at = 0
            self._idle.append(bell)
        else:
            bell.wake_at = self._arrived_rows + decision.missing_rows
            bell.alarm = self.context.loop.call_later(decision.wait_ns / 1e9, self._alarm, bell)
            self._idle.appendleft(bell)  # it is forming a batch: arrivals are its business first
        return []

    def leave(self, bell: LoopBell) -> None:
        if bell in self._idle:
            self._idle.remove(bell)
            bell.silence()
        if self._idle and len(self._queue):  # what it was waiting to complete is somebody else's now
            self._wake_one()

    def _alarm(self, bell: LoopBell) -> None:
        """The queue delay of the batch that ``bell`` is waiting to complete is over."""
        self._idle.remove(bell)
        bell.ring()

    def _announce(self, request: InferRequest) -> None:
        """Wake an instance soon: once the loop has decoded what else has arrived by now.

        To wake it at once would cost a thread switch per request, and batches of one.
        """
        self._arrived_rows += request.rows or 1
        if self._idle:
            if request.batch_key != self._forming_key or not self._joins_behind:
                self._arrived_rows += _NEWS  # it may complete the batch that is being formed, by not joining it
            if not self._is_waking:
                self._is_waking = True
                self._call_soon(self._wake)

    def _look_again(self) -> None:
        """A request has left its place in the queue: those that remain may be a batch."""
        self._arrived_rows += _NEWS
        if self._idle and not self._is_waking and len(self._queue):
            self._is_waking = True
            self._call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        if self._idle and self._arrived_rows >= self._idle[0].wake_at:
            self._wake_one()

    # ------------------------------------------------------------------ instance threads

    def take(self, bell: Bell) -> list[InferRequest] | None:
        while not self._closed:
            arrived = self._arrived_rows
            batch, decision = self._next()
            if batch:
                return batch
            if decision is None:
                self._sleep(bell, arrived, 0, None)
            elif not decision.count:
                self._sleep(bell, arrived, arrived + decision.missing_rows, decision.wait_ns)
        return None

    def _next(self) -> tuple[list[InferRequest], Decision | None]:
        """A batch, or why there is none: nothing waits (None), it is too early, or others were faster."""
        rule, queue, now_ns = self._rule, self._queue, monotonic_ns()
        # A request past its deadline is left to its timer, which is about to answer it.
        head = queue.head(rule.max_requests)
        waiting = [r for r in head if not 0 < r.deadline_ns <= now_ns]
        if len(waiting) < len(head):  # their places are for those behind them
            head = queue.head(len(queue))
            waiting = [r for r in head if not 0 < r.deadline_ns <= now_ns][: rule.max_requests]
        if not waiting:
            return [], None
        decision = decide(waiting, rule, now_ns)
        if not decision.count:
            self._forming_key = waiting[0].batch_key
        batch = [request for request in waiting[: decision.count] if queue.remove(request)]
        if batch and self._idle and len(queue):
            self._wake_one()
        return batch, decision

    def _sleep(self, bell: Bell, arrived: int, wake_at: int, timeout_ns: int | None) -> None:
        """Wait for a ring, unless something arrived since the caller looked."""
        bell.wake_at = wake_at
        if wake_at:
            self._idle.appendleft(bell)  # it is forming a batch: arrivals are its business first
        else:
            self._idle.append(bell)
        missed = self._arrived_rows != arrived
        if missed or self._closed or not bell.wait(timeout_ns):
            try:
                self._idle.remove(bell)
            except ValueError:
                bell.wait()  # somebody has taken the bell to ring it: let that ring pass

    def _wake_one(self) -> None:
        with contextlib.suppress(IndexError):  # woken by somebody else in the meantime
            self._idle.popleft().ring()
