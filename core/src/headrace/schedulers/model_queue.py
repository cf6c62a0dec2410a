"""The queue of one version of a model: requests wait, idle instances are woken, every request is answered once.

A `Scheduler` chooses the next requests, and the model queue does the rest. For an idle instance, `Scheduler.next` is
called on the event loop, at most once per turn of the loop, and only after a change. The instance is then woken with
its batch. An instance that returns from a batch calls `next` on its own thread, if its scheduler allows that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from headrace.errors import Cancelled, Code, HeadraceError, InternalError, Unavailable, summary
from headrace.executors.instance import ExecutionRecorder
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import Clock, FullScheduler, InstanceInfo, ScheduledModel, Scheduler, Timer
from headrace.schedulers.dispatcher import Dispatcher
from headrace.schedulers.in_flight import AWAITED, InFlightTracker
from headrace.schedulers.instance_source import InstanceSource, Limiter
from headrace.schedulers.response_tracker import ResponseTracker
from headrace.telemetry.executions import Duration
from headrace.telemetry.log_limits import rate_limited_logger
from headrace.telemetry.statistics import ModelStatistics

log = rate_limited_logger(__name__)

STOPPING = "Server is stopping"


class ModelQueue(Dispatcher):
    """Runs a scheduler of class ``kind`` for one version of a model.

    Event loop only, except `in_flight`, `pending`, `at_once`, `hand_on`, `update_takers` and `InstanceSource.take`.

    ``limiter``, if there is one, creates the sources of the instances.
    """

    sources: list[InstanceSource]

    def __init__(
        self,
        kind: type[Scheduler],
        model: ScheduledModel,
        statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
        clock: Clock | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        super().__init__(kind, model, loop, clock)
        self.statistics, self.limiter = statistics, limiter
        self._source = InstanceSource if limiter is None else limiter.source
        self.use_sources([self._source(self, instance) for instance in model.instances])
        self._name, self._version = model.config.name, model.version
        self._tracker = InFlightTracker(self.full_scheduler.keeps_order)
        if model.config.model_transaction_policy.decoupled:
            self._tracker = ResponseTracker(self.full_scheduler.keeps_order, statistics.responses)
        self._recorder: ExecutionRecorder | None = None
        self._timers: dict[Ticket, Timer] = {}
        #: Sources of instances that are being removed.
        self._dismissed: list[InstanceSource] = []
        # Bound once, because every request needs them: `Clock.now_ns`, `Scheduler.submit`, `RequestQueue.first`,
        # `InFlightTracker.open`, and `_cancel`, which a ticket calls when it is cancelled.
        self._now_ns, self._submit, self._first = self.clock.now_ns, self.scheduler.submit, self.queue.first
        self._asks_scheduler = getattr(self._submit, "__func__", None) is not Scheduler.submit
        self._on_cancel = self._cancel
        self._open = self._tracker.open
        self._holds_back = bool(self.kept) or self.full_scheduler.keeps_order
        self._has_instances = self.full_scheduler.needs_instances

    # ------------------------------------------------------------------ in

    def submit(self, ticket: Ticket, has_entered: bool = False) -> None:
        """Own ``ticket`` from now on, and answer it exactly once with ``final`` set.

        Raises `Unavailable`, and what the scheduler raises, if the request is refused; ``ticket`` is then not owned.

        All requests enter here. `CachingModelQueue` answers some before this, and submits others late. Those have
        already entered (``has_entered``): they are not refused while the server stops, and stay owned if the scheduler
        raises.
        """
        if self._tracker.is_closing and not (has_entered or self.full_scheduler.continues(ticket)):
            raise self._closing(ticket)
        ticket.queued_ns = self._now_ns()
        ticket.on_cancel = self._on_cancel
        self._open[ticket] = AWAITED
        if self._holds_back:
            ticket.respond_at_once = None  # an answer may have to wait for its turn, or may have outputs to remove
        try:
            level = self._submit(ticket) if self._asks_scheduler else None
        except BaseException as error:
            if not has_entered:
                self._refuse(ticket, error)
            raise
        if level is None:
            self._first[ticket] = None
        elif level:
            self.queue.add(ticket, level)
        else:
            ticket.on_cancel = self._cancel_own
            return
        if ticket.deadline_ns:
            self._start_timer(ticket)
        self.change_count += ticket.rows or 1
        if self.idle and not self._is_waking:
            # Soon: the loop first decodes the other requests that have arrived. Waking an instance at once would cost
            # one thread switch per request, and give batches of one.
            self._is_waking = True
            self.call_soon(self._wake)

    def _start_timer(self, ticket: Ticket) -> None:
        """Let `_expire` be called at the deadline of ``ticket``."""
        delay_ns = ticket.deadline_ns - ticket.queued_ns
        self._timers[ticket] = self.clock.call_later(delay_ns, self._expire, ticket)

    @staticmethod
    def _closing(ticket: Ticket) -> Unavailable:
        return Unavailable(
            f"{ticket.request.log_id}Server is stopping, scheduler for model has stopped accepting new inference "
            "requests"
        )

    def _refuse(self, ticket: Ticket, error: BaseException) -> None:
        self._tracker.forget(ticket)
        ticket.on_cancel = None
        if isinstance(error, Unavailable):
            self.statistics.rejected.count += 1
        elif not isinstance(error, Exception | KeyboardInterrupt):  # from a plugin, which must not end the loop
            raise InternalError(summary(error)) from error

    # ------------------------------------------------------------------ out

    def progress(self, ticket: Ticket, response: Answer) -> None:
        """Deliver a response that is not the last of ``ticket``."""
        self._tracker.progress(ticket, self._stripped(response, self.unasked.get(ticket)) if self.kept else response)

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """Deliver the last answer of each of ``tickets``."""
        if self._timers:
            for ticket in tickets:
                if (timer := self._timers.pop(ticket, None)) is not None:
                    timer.cancel()
        give = self._tracker.answer
        for ticket, answer in zip(tickets, answers, strict=True):
            give(ticket, answer)

    def finish_and_deliver(
        self, source: InstanceSource | None, tickets: Sequence[Ticket], answers: Sequence[Answer]
    ) -> None:
        """Do as `deliver`, if `calls_finished`."""
        try:
            self.scheduler.finished(tickets, answers, None if source is None else source.instance)
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.exception("scheduler '%s' raised an exception in finished()", self.scheduler.name)
        if self.kept:
            left_out = self.unasked.pop
            answers = [
                self._stripped(answer, left_out(ticket, None)) for ticket, answer in zip(tickets, answers, strict=True)
            ]
        self.deliver(tickets, answers)
        self.ask_again()

    def answer_for_scheduler(self, ticket: Ticket, answer: Answer, final: bool = True) -> None:
        """Answer ``ticket`` for the scheduler. Do nothing if it already has its last answer."""
        if self._open.get(ticket) is not AWAITED:
            return
        if isinstance(answer, InferResponse) and not answer.model_name:
            answer.model_name, answer.model_version = self._name, self._version
            answer.id = answer.id or ticket.request.id
        if not final:
            self._tracker.progress(ticket, answer)
            return
        has_instances = self._has_instances
        if has_instances and self.queue.remove(ticket) and isinstance(answer, Unavailable | Cancelled):
            self._count(
                ticket, self.statistics.rejected if isinstance(answer, Unavailable) else self.statistics.cancelled
            )
        elif isinstance(answer, HeadraceError) and not has_instances:
            is_cancelled = ticket.cancelled and answer.code is Code.CANCELLED
            self._count(ticket, self.statistics.cancelled if is_cancelled else self.statistics.other_failures)
        else:
            ticket.started_ns = ticket.started_ns or self._now_ns()
            if self._recorder is None:
                self._recorder = ExecutionRecorder(self.scheduler.name, self.statistics.for_instance)
            self._recorder.late(ticket, answer, not has_instances)
        if self._timers and (timer := self._timers.pop(ticket, None)) is not None:
            timer.cancel()
        self._tracker.answer(ticket, answer)

    def _stripped(self, answer: Answer, unasked: frozenset[str] | None) -> Answer:
        """Remove from ``answer`` the outputs in ``unasked``; if it is None, those in `hidden`."""
        if not isinstance(answer, InferResponse):
            return answer
        hidden = unasked or self.hidden
        answer.outputs = {name: tensor for name, tensor in answer.outputs.items() if name not in hidden}
        return answer

    def _expire(self, ticket: Ticket) -> None:
        """Reject or postpone ``ticket``, whose deadline has passed. Does not depend on a free instance."""
        if ticket not in self.queue:
            return
        try:
            level = self.full_scheduler.expired(ticket)
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.exception("scheduler '%s' raised an exception in expired()", self.scheduler.name)
            level = None
        if level is None:
            self._answer_waiting(ticket, Unavailable("Request timeout expired"), self.statistics.rejected)
        elif self.queue.postpone(ticket, level):
            ticket.deadline_ns = 0
            self.ask_again()

    def _cancel(self, ticket: Ticket) -> None:
        self._answer_waiting(
            ticket, Cancelled(f"{ticket.request.log_id}request was cancelled"), self.statistics.cancelled
        )

    def _cancel_own(self, ticket: Ticket) -> None:
        """Cancel a request that the scheduler answers itself."""
        if self._tracker.awaits(ticket):
            self._answer_unexecuted(
                ticket, Cancelled(f"{ticket.request.log_id}request was cancelled"), self.statistics.cancelled
            )

    def _answer_waiting(self, ticket: Ticket, error: HeadraceError, reason: Duration) -> None:
        """Answer a request that no instance will run. Do nothing if an instance already has it."""
        if self.queue.remove(ticket):
            self._answer_unexecuted(ticket, error, reason)
            self.ask_again()

    def _answer_unexecuted(self, ticket: Ticket, error: HeadraceError, reason: Duration) -> None:
        self._count(ticket, reason)
        if self.calls_finished:
            self.finish_and_deliver(None, (ticket,), (error,))
        else:
            self.deliver((ticket,), (error,))

    def _count(self, ticket: Ticket, reason: Duration) -> None:
        reason.count += 1
        reason.ns += self._now_ns() - ticket.arrival_ns

    # ------------------------------------------------------------------ replacing instances

    @property
    def can_replace_instances(self) -> bool:
        """True if the scheduler is kept when its model gets other instances."""
        is_notified = type(self.full_scheduler).instances_changed is not FullScheduler.instances_changed
        return self.scheduler.instances_alike or is_notified

    def replace_instances(
        self, added: Sequence[InstanceInfo], removed: Sequence[InstanceSource]
    ) -> list[InstanceSource]:
        """Add the instances ``added`` and stop using the sources ``removed``. Return the new sources.

        The caller then calls `dismiss` for each removed source.
        """
        new = [self._source(self, instance) for instance in added]
        sources = [source for source in self.sources if source not in removed] + new
        self.instances[:] = [source.instance for source in sources]
        self.use_sources(sources)
        try:
            self.full_scheduler.instances_changed()
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.exception("scheduler '%s' raised an exception in instances_changed()", self.scheduler.name)
        return new

    async def dismiss(self, source: InstanceSource) -> None:
        """Give the instance only what its scheduler has bound to it. Return when it has run all that it was given."""
        returned = asyncio.get_running_loop().create_future()
        source.on_idle_after_close = partial(returned.set_result, None)
        self._dismissed.append(source)
        try:
            if self.closed or type(self.full_scheduler).lets_go is FullScheduler.lets_go:
                source.close()
            else:
                source.close_when(self.full_scheduler.lets_go)
                self.ask_again()
            await returned
        finally:
            self._dismissed.remove(source)

    async def wait_until_answered(self, tickets: Iterable[Ticket]) -> None:
        """Return when each of ``tickets`` has its last answer."""
        left = {ticket for ticket in tickets if self._tracker.awaits(ticket)}
        done = asyncio.get_running_loop().create_future()

        def watcher(ticket: Ticket, answer: Answer, final: bool) -> Answer:
            if final:
                left.discard(ticket)
                if not left and not done.done():
                    done.set_result(None)
            return answer

        for ticket in left:
            ticket.watch(watcher)
        if left:
            await done

    # ------------------------------------------------------------------ how many, and the end

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet answered."""
        return self._tracker.count

    @property
    def pending(self) -> int:
        """Requests that wait for an instance."""
        return len(self.queue)

    def has_waiting(self, ticket: Ticket) -> bool:
        """True if ``ticket`` waits for an instance."""
        return ticket in self.queue

    async def drain(self) -> None:
        """Refuse new requests. Return when every submitted one is answered."""
        await self._tracker.close()

    def close(self) -> None:
        """End every `take`. Answer the waiting requests with `Unavailable`."""
        self.closed = True
        for source in (*self.sources, *self._dismissed):
            source.close()
        for ticket in self.queue.head(len(self.queue)):
            self._answer_waiting(ticket, Unavailable(f"{ticket.request.log_id}{STOPPING}"), self.statistics.rejected)
        try:
            self.full_scheduler.close()
        except Exception:
            log.exception("scheduler '%s' failed to close", self.scheduler.name)

    def abandon(self) -> None:
        """`close`, and answer with `Unavailable` and cancel the requests that instances run, without waiting for them.

        Later answers to them are dropped.
        """
        self.close()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._tracker.abandon(STOPPING)
