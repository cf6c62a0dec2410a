"""The source of one instance's batches, on a thread or on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import ClassVar, Protocol

from headrace.errors import InternalError, summary
from headrace.executors.executor import Executor
from headrace.executors.threads import LoopWakeup, Wakeup
from headrace.messages.ticket import Batch, Padding, ReasonedBatch, Ticket
from headrace.schedulers.base import InstanceInfo, Timer, Wait
from headrace.schedulers.dispatcher import Dispatcher
from headrace.schedulers.resource_use import ResourceUse
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)

#: If the scheduler fails, `Scheduler.next` is called for the instance again after 1 s.
RETRY_NS = 1_000_000_000
#: On the event loop, an instance starts batches for at most 0.5 ms after its first one ended. Then sockets are polled.
TURN_NS = 500_000


class InstanceSource:
    """The `headrace.executors.executor.BatchSource` of ``instance``, whose executor either takes or polls.

    While the source is in `Dispatcher.idle`, the event loop calls `offer` when `Dispatcher.change_count` reaches
    ``wake_at``. 0: at any change. ``inf``: only by the timer. ``wait`` is the scheduler's last `Wait`. A ``closed``
    source gives out nothing. ``on_idle_after_close``, if set, is called once, when the source is closed and its
    instance idle.
    """

    __slots__ = (
        "_batch",
        "_choose",
        "_has_returned",
        "_is_away",
        "_is_ended",
        "_is_parked",
        "_is_polled",
        "_kept",
        "_model_queue",
        "_name",
        "_now_ns",
        "_on_threads",
        "_queue",
        "_record",
        "_remove",
        "_run_batch",
        "_skips_empty",
        "_timer",
        "_wakeup",
        "calls_at_once",
        "closed",
        "deliver",
        "executor",
        "instance",
        "on_idle_after_close",
        "progress",
        "wait",
        "wake_at",
    )  # fmt: skip
    #: True if requests may wait although this instance is idle: `Scheduler.next` is then called for another one.
    is_limited: ClassVar[bool] = False

    def __init__(self, model_queue: Dispatcher, instance: InstanceInfo) -> None:
        self.instance, self._name = instance, instance.name
        self.wait: Wait | None = None
        self.wake_at: float = 0
        self.calls_at_once = 1
        self.progress = model_queue.progress
        #: `Dispatcher.deliver`, or `Dispatcher.finish_and_deliver` if `Dispatcher.calls_finished`.
        self.deliver = model_queue.deliver
        if model_queue.calls_finished:
            self.deliver = partial(model_queue.finish_and_deliver, self)
        self._model_queue = model_queue
        # Bound once, because every batch needs them: `Clock.now_ns` and `RequestQueue.remove`.
        self._now_ns, self._remove = model_queue.clock.now_ns, model_queue.queue.remove
        #: `Scheduler.next`. `close_when` puts a function before it.
        self._choose = model_queue.scheduler.next
        #: `BatchHistory.add`. A source that a `Limiter` created may put a function before it.
        self._record = model_queue.history.add
        self._kept, self._queue = model_queue.kept, model_queue.queue
        self._on_threads = model_queue.scheduler.on_threads
        #: True if `Scheduler.next` is not called while nothing waits: it chooses from the waiting requests only.
        self._skips_empty = self._on_threads
        #: True if the executor calls `poll` on the event loop. False if its thread calls `take`.
        self._is_polled = False
        #: The argument of `run_on_loop`: runs a batch on the event loop. None if the instance's thread runs them.
        self._run_batch: Callable[[list[Ticket]], int] | None = None
        self._wakeup: Wakeup | LoopWakeup | None = None
        self._batch: list[Ticket] | None = None
        self._timer: Timer | None = None
        #: True if the last `poll` or `offer` found no batch: the source is in `Dispatcher.idle` since.
        self._is_parked = False
        #: True while its process is down, from `stop_polling` to the next `poll`.
        self._is_away = False
        #: True once the source is closed and its instance idle.
        self._has_returned = False
        #: True once `end` has woken the executor to exit.
        self._is_ended = False
        self.closed = model_queue.closed
        #: `ModelQueue.dismiss` sets it.
        self.on_idle_after_close: Callable[[], None] | None = None
        #: The executor that runs the batches, once the instance serves.
        self.executor: Executor | None = None

    # ------------------------------------------------------------------ the scheduler

    def _next_batch(self) -> list[Ticket]:
        """Return the batch that the instance runs now, or an empty list if it must wait. The instance owns the batch.

        Runs on any thread if the scheduler allows that. Every batch passes here. A source that a `Limiter` created
        overrides this: it decides before the scheduler does.
        """
        if self._skips_empty and not any(self._queue.lanes):
            self.wait = None
            return []
        now_ns = self._now_ns()
        chosen = self._choose(self.instance, now_ns)
        if isinstance(chosen, Wait):
            self.wait, self._model_queue.has_formed_batches, self._model_queue.threads_take = chosen, True, False
            return []
        self.wait = None
        return self._dequeue(chosen, now_ns) or self._ask_after_conflict() if chosen else []

    def _dequeue(self, chosen: Sequence[Ticket], now_ns: int) -> list[Ticket]:
        """Remove ``chosen`` from the queue and record the batch. Return the requests that were still waiting."""
        pop, remove = self._queue.first.pop, self._remove  # nearly all wait in the first lane
        if self._kept:
            self._request_kept_outputs(chosen)
        reason, rows, is_pinned = "", 0, False
        if isinstance(chosen, ReasonedBatch):
            reason, rows = chosen.reason, chosen.rows
            if isinstance(chosen, Batch):
                is_pinned = chosen.pinned
                for ticket, added in zip(chosen, chosen.added, strict=False):
                    if added:
                        request = ticket.request
                        ticket.request = request.with_inputs({**request.inputs, **added})
        batch = requests = [ticket for ticket in chosen if pop(ticket, ticket) is None or remove(ticket)]
        count = len(batch)
        if count < len(chosen):  # some were cancelled or taken meanwhile, or are padding
            if not count:
                return batch
            dequeued, rows = set(batch), 0
            batch = Batch([ticket for ticket in chosen if ticket in dequeued or isinstance(ticket, Padding)])
        if is_pinned:
            for ticket in requests:
                ticket.pinned = True
        first_ns = requests[0].queued_ns
        if count == 1:
            rows, last_ns = requests[0].rows, first_ns
        else:
            rows, last_ns = rows or sum([ticket.rows for ticket in requests]), requests[-1].queued_ns
        lanes = self._queue.lanes
        waiting = len(lanes[0]) + len(lanes[1]) if len(lanes) == 2 else len(self._queue)  # few models have levels
        self._record((now_ns, self._name, reason, count, rows, first_ns, last_ns, waiting))
        return batch

    def _request_kept_outputs(self, chosen: Sequence[Ticket]) -> None:
        shown = self._model_queue.kept - self._model_queue.hidden
        for ticket in chosen:
            if outputs := ticket.request.outputs:
                if unasked := shown.difference(outputs):
                    self._model_queue.unasked[ticket] = self._model_queue.hidden | unasked
                ticket.request = ticket.request.with_outputs(tuple(dict.fromkeys((*outputs, *self._kept))))

    def _ask_after_conflict(self) -> list[Ticket]:
        """Call `Scheduler.next` again, after other threads took every chosen request.

        At most 100 times: a scheduler that returns requests which do not wait would be called forever.
        """
        for _ in range(100):
            now_ns = self._now_ns()
            chosen = self._choose(self.instance, now_ns)
            if isinstance(chosen, Wait) or not chosen:
                self.wait = chosen if isinstance(chosen, Wait) else None
                return []
            if batch := self._dequeue(chosen, now_ns):
                return batch
        raise InternalError(f"scheduler '{self._model_queue.scheduler.name}' returned requests that do not wait")

    # ------------------------------------------------------------------ the instance's thread

    def take(self, wakeup: Wakeup) -> list[Ticket] | None:
        """Return the next batch, owned by the caller. Block on ``wakeup`` until there is one. Return None when
        closed."""
        model_queue, idle = self._model_queue, self._model_queue.idle
        self._wakeup = wakeup
        while not self.closed:
            arrived, self.wake_at, self.wait = model_queue.change_count, 0, None
            asks = self._on_threads and self._run_batch is None
            if asks and (batch := self._next_batch()):
                if idle:
                    model_queue.hand_on()
                return batch
            idle.append(self)
            if self.closed or (model_queue.change_count != arrived and asks):
                with suppress(ValueError):
                    idle.remove(self)
                    continue
            elif self.wait is not None or not asks:  # the event loop keeps the timers, and may have to poll itself
                with suppress(RuntimeError):  # the loop has ended, and so has the server
                    model_queue.call_soon_threadsafe(model_queue.wake_soon)
            wakeup.wait()
            assigned, self._batch = self._batch, None
            if assigned:
                return assigned
        self._stand_by(wakeup)
        return None

    def run_on_loop(self, run: Callable[[list[Ticket]], int] | None) -> None:
        """Run the batches by ``run`` on the event loop from now on, while the instance's thread sleeps. None ends that.

        ``run`` returns the monotonic time at which the batch ended, and raises nothing. Called by the instance's thread
        between two batches, or by ``run``.
        """
        self._run_batch = run
        self._model_queue.update_takers()

    def _stand_by(self, wakeup: Wakeup) -> None:
        """Report the return of the instance, and keep its thread alive while its earlier requests may still need it."""
        with suppress(RuntimeError):  # the loop has ended, and so has the server
            self._model_queue.call_soon_threadsafe(self._return)
            if not (self._model_queue.closed or self._is_ended):
                wakeup.wait()

    # ------------------------------------------------------------------ event loop

    def poll(self, wakeup: LoopWakeup) -> list[Ticket] | None:
        """Return the next batch, owned by the caller, or an empty list. `take` for the event loop.

        After an empty list, ``wakeup`` is woken once, when a new `poll` may find a batch. Return None when closed.
        """
        self._wakeup, self._is_polled, self._is_away = wakeup, True, False
        if self.closed:
            self._return()
            return None
        try:
            batch = self._next_batch()
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise InternalError(summary(error)) from error
        if not batch:
            self._park()
        return batch

    def stop_polling(self, wakeup: LoopWakeup) -> None:
        """Stop polling for now. Another instance gets what ``wakeup`` was woken for."""
        with suppress(ValueError):
            self._model_queue.idle.remove(self)
        self._cancel_timer()
        self._is_away = True
        if self.closed:
            self._return()
        self._model_queue.ask_again()

    def offer(self) -> bool:
        """Give this instance a batch, or wake it to take one. The caller has removed it from `idle`.

        Return False if the other instances, if alike, need not be tried now: the scheduler returned nothing, or this
        instance wakes the next one itself. Event loop only.
        """
        self._cancel_timer()
        self._is_parked = False
        wakeup, model_queue, run = self._wakeup, self._model_queue, self._run_batch
        assert wakeup is not None
        if run is not None:
            return self._run_waiting(run)
        if self._is_polled or model_queue.threads_take:
            wakeup.wake()  # the thread takes all that waits when it wakes, and wakes another thread for the rest
            # An executor that polls does so inside `wake`. If it found nothing, it is parked again.
            return self._is_polled and not self._is_parked
        batch = self._next_batch_on_loop()
        if not batch:
            return batch is None
        self._batch = batch
        wakeup.wake()
        return True

    def _run_waiting(self, run: Callable[[list[Ticket]], int]) -> bool:
        """Run batches on the event loop. Return False after `TURN_NS`, or if no batch was left."""
        until_ns = 0
        while batch := self._next_batch_on_loop():
            ended_ns = run(batch)
            self.has_run()
            if self.closed:  # closed during the batch, when it was not idle
                self._return()
                return True
            until_ns = until_ns or ended_ns + TURN_NS
            if ended_ns >= until_ns or self._run_batch is None:
                self.wake_at = 0
                self._model_queue.idle.append(self)
                self._model_queue.wake_soon()
                return False
        return batch is None

    def executed(self, took_ns: int) -> None:
        """Record the duration of an execution. Any thread."""
        self._model_queue.last_ns = took_ns

    @property
    def may_overlap(self) -> bool:
        """True if the executor may take another batch while it runs one.

        False if the scheduler treats instances differently, or if the resources of an execution are counted from one
        `take` to the next.
        """
        return self._model_queue.scheduler.instances_alike and not self.is_limited

    @property
    def runs_on_loop(self) -> bool:
        """True if the event loop runs the batches of an executor that otherwise takes them on a thread."""
        return self._run_batch is not None

    def has_run(self) -> None:
        """Called when an execution on the event loop has returned."""

    def _next_batch_on_loop(self) -> list[Ticket] | None:
        """Do as `_next_batch`, and park the instance if it gets nothing.

        Return None if the scheduler failed: the instance is then parked for `RETRY_NS`.
        """
        model_queue = self._model_queue
        try:
            batch = self._next_batch()
        except BaseException as error:
            log.exception("the scheduler of instance '%s' raised an exception in next()", self.instance.name)
            self.wake_at = inf
            self._timer = model_queue.clock.call_later(RETRY_NS, self.ask_now)
            model_queue.idle.append(self)
            if isinstance(error, KeyboardInterrupt):
                raise
            return None
        if not batch:
            self._park()
        return batch

    def wake(self) -> None:
        """Wake the executor, which then calls `take` or `poll`. Any thread."""
        assert self._wakeup is not None
        self._wakeup.wake()

    def close(self) -> None:
        """Give out no more batches. `on_idle_after_close` is called now, or when the instance is idle. Event loop
        only."""
        self.closed = True
        try:
            self._model_queue.idle.remove(self)
        except ValueError:  # it runs a batch, or is about to call `take` or `poll`
            if not (self._is_away or self._has_returned):
                return
        self._cancel_timer()
        self._return()

    def close_when(self, lets_go: Callable[[InstanceInfo], bool]) -> None:
        """`close` as soon as ``lets_go`` returns True. It is called before each `Scheduler.next`."""
        choose = self._choose

        def ask(instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            if not lets_go(instance):
                return choose(instance, now_ns)
            self._model_queue.call_soon_threadsafe(self.close)
            return ()

        self._choose, self._skips_empty = ask, False

    def _return(self) -> None:
        """Call `on_idle_after_close`: the source is closed and its instance idle."""
        self._has_returned = True
        call, self.on_idle_after_close = self.on_idle_after_close, None
        if call is not None:
            call()
        if self._model_queue.closed and not self._is_away:
            self.end()

    def end(self) -> None:
        """Wake the executor, which is idle or stands by, so that it finds the source closed. Works once."""
        if not self._is_ended:
            self._is_ended = True
            self._cancel_timer()
            if self._wakeup is not None:
                self.wake()

    def _park(self) -> None:
        model_queue, wait = self._model_queue, self.wait
        self._is_parked = True
        if wait is None:
            self.wake_at = 0
            # An instance on the event loop needs no waking, so it is first. But a forming batch precedes it.
            is_first = self._run_batch is not None and not model_queue.has_formed_batches
            (model_queue.idle.appendleft if is_first else model_queue.idle.append)(self)
        else:
            self.wake_at = model_queue.change_count + wait.rows
            self._timer = model_queue.clock.call_later(wait.delay_ns, self.ask_now)
            model_queue.idle.appendleft(self)  # it is forming a batch: arrivals are offered to it first

    def ask_now(self) -> bool:
        """Call `offer` if the instance is idle. Return True if it was. Event loop only."""
        self._timer = None
        try:
            self._model_queue.idle.remove(self)
        except ValueError:  # another thread has taken it from the idle ones
            return False
        self.offer()
        return True

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Limiter(Protocol):
    """Shares scarce resources among the instances of several models: a
    `headrace.schedulers.rate_limiter.RateLimiter`."""

    def source(self, model_queue: Dispatcher, instance: InstanceInfo) -> InstanceSource:
        """Return the source of batches of ``instance``."""

    def uses(self, instances: Sequence[InstanceInfo]) -> Sequence[ResourceUse]:
        """Return the use of each resource that ``instances`` need. Any thread."""
