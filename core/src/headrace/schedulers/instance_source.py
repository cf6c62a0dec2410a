"""Where one instance gets its batches from, on a thread or on the event loop."""

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
from headrace.telemetry.pacing import paced

log = paced(__name__)

#: How long after a failure of its scheduler an instance is asked for again.
RETRY_NS = 1_000_000_000
#: How long after its first batch an instance on the event loop goes on, before the loop looks at its sockets.
TURN_NS = 500_000


class InstanceSource:
    """A `headrace.executors.executor.BatchSource` for ``instance``, whose executor either takes or polls.

    While it is among the idle of ``kernel``, the event loop may offer it a batch. ``wake_at`` is how many rows must
    have arrived to make that worth while, ``wait`` what the scheduler said last. Once it is ``closed`` it gives out
    nothing any more, and ``on_return``, if it is set, is called when the instance has returned from what it had.
    """

    __slots__ = (
        "_alarm",
        "_batch",
        "_has_returned",
        "_is_away",
        "_is_ended",
        "_is_parked",
        "_kept",
        "_kernel",
        "_name",
        "_next",
        "_now_ns",
        "_on_loop",
        "_on_threads",
        "_queue",
        "_remember",
        "_remove",
        "_run",
        "_wakeup",
        "calls_at_once",
        "closed",
        "deliver",
        "executor",
        "instance",
        "on_return",
        "progress",
        "wait",
        "wake_at",
    )  # fmt: skip
    #: Whether it may be kept from running what waits for it, so that another has to be asked.
    is_limited: ClassVar[bool] = False

    def __init__(self, kernel: Dispatcher, instance: InstanceInfo) -> None:
        self.instance, self._name = instance, instance.name
        self.wait: Wait | None = None
        self.wake_at: float = 0
        self.calls_at_once = 1
        self.progress = kernel.progress
        #: `Dispatcher.deliver`; or `Dispatcher.deliver_heard` if the scheduler has a `Scheduler.finished`.
        self.deliver = partial(kernel.deliver_heard, self) if kernel.hears else kernel.deliver
        self._kernel = kernel
        # Bound once, because every batch needs them: `Scheduler.next`, `Clock.now_ns`, `RequestQueue.remove`,
        # `BatchHistory.add`.
        self._next, self._now_ns, self._remove = kernel.scheduler.next, kernel.clock.now_ns, kernel.queue.remove
        self._kept, self._queue, self._remember = kernel.kept, kernel.queue, kernel.history.add
        self._on_threads = kernel.scheduler.on_threads
        self._on_loop = False
        #: What `run_on_loop` was given: runs a batch on the event loop. None if the instance's thread runs them.
        self._run: Callable[[list[Ticket]], int] | None = None
        self._wakeup: Wakeup | LoopWakeup | None = None
        self._batch: list[Ticket] | None = None
        self._alarm: Timer | None = None
        self._is_parked = self._is_away = self._has_returned = self._is_ended = False
        self.closed = kernel.closed
        #: `Kernel.dismiss` sets it.
        self.on_return: Callable[[], None] | None = None
        #: What runs the batches, once it serves.
        self.executor: Executor | None = None

    # ------------------------------------------------------------------ the scheduler

    def _ask(self) -> list[Ticket]:
        """The batch that the instance runs now, which is its from here on; empty if it has to wait.

        On any thread if the scheduler says so. The one way out of the queue: a `Limiter` stands here, before the
        scheduler is asked.
        """
        now_ns = self._now_ns()
        chosen = self._next(self.instance, now_ns)
        if isinstance(chosen, Wait):
            self.wait, self._kernel.forms_batches, self._kernel.threads_take = chosen, True, False
            return []
        self.wait = None
        return self._claim(chosen, now_ns) or self._ask_after_losing() if chosen else []

    def _claim(self, chosen: Sequence[Ticket], now_ns: int) -> list[Ticket]:
        """Those of ``chosen`` that still waited, and wait no more; they are remembered as a batch."""
        remove = self._remove
        if self._kept:
            self._ask_for_kept(chosen)
        reason, rows, is_pinned = "", 0, False
        if isinstance(chosen, ReasonedBatch):
            reason, rows = chosen.reason, chosen.rows
            if isinstance(chosen, Batch):
                is_pinned = chosen.pinned
                for ticket, added in zip(chosen, chosen.added, strict=False):
                    if added:
                        request = ticket.request
                        ticket.request = request.with_inputs({**request.inputs, **added})
        claimed = requests = [ticket for ticket in chosen if remove(ticket)]
        count = len(claimed)
        if count < len(chosen):  # some have left, or are nobody's
            if not count:
                return claimed
            taken, rows = set(claimed), 0
            claimed = Batch([ticket for ticket in chosen if ticket in taken or isinstance(ticket, Padding)])
        if is_pinned:
            for ticket in requests:
                ticket.pinned = True
        first_ns = requests[0].queued_ns
        if count == 1:
            rows, last_ns = requests[0].rows, first_ns
        else:
            rows, last_ns = rows or sum([ticket.rows for ticket in requests]), requests[-1].queued_ns
        lanes = self._queue.lanes
        waiting = len(lanes[0]) + len(lanes[1]) if len(lanes) == 2 else len(self._queue)  # hardly a model has levels
        self._remember((now_ns, self._name, reason, count, rows, first_ns, last_ns, waiting))
        return claimed

    def _ask_for_kept(self, chosen: Sequence[Ticket]) -> None:
        shown = self._kernel.kept - self._kernel.hidden
        for ticket in chosen:
            if outputs := ticket.request.outputs:
                if unasked := shown.difference(outputs):
                    self._kernel.unasked[ticket] = self._kernel.hidden | unasked
                ticket.request = ticket.request.with_outputs(tuple(dict.fromkeys((*outputs, *self._kept))))

    def _ask_after_losing(self) -> list[Ticket]:
        """Others were faster; there may be more. A scheduler that gives what does not wait would be asked for ever."""
        for _ in range(100):
            now_ns = self._now_ns()
            chosen = self._next(self.instance, now_ns)
            if isinstance(chosen, Wait) or not chosen:
                self.wait = chosen if isinstance(chosen, Wait) else None
                return []
            if batch := self._claim(chosen, now_ns):
                return batch
        raise InternalError(f"scheduler '{self._kernel.scheduler.name}' gives out requests that do not wait")

    # ------------------------------------------------------------------ the instance's thread

    def take(self, wakeup: Wakeup) -> list[Ticket] | None:
        """The next batch, owned by the caller; blocks on ``wakeup``. None when closed."""
        kernel, idle = self._kernel, self._kernel.idle
        self._wakeup = wakeup
        while not self.closed:
            arrived, self.wake_at, self.wait = kernel.arrived, 0, None
            asks = self._on_threads and self._run is None
            if asks and (batch := self._ask()):
                if idle:
                    kernel.hand_on()
                return batch
            idle.append(self)
            if self.closed or (kernel.arrived != arrived and asks):
                with suppress(ValueError):
                    idle.remove(self)
                    continue
            elif self.wait is not None or not asks:  # the event loop has the timers, and may ask
                with suppress(RuntimeError):  # it has ended, and the server with it
                    kernel.call_soon_threadsafe(kernel.wake_soon)
            wakeup.wait()
            given, self._batch = self._batch, None
            if given:
                return given
        self._stand_by(wakeup)
        return None

    def run_on_loop(self, run: Callable[[list[Ticket]], int] | None) -> None:
        """From now on have ``run`` run the batches on the event loop, while the thread sleeps that takes from here;
        None ends that.

        ``run`` returns when the batch was through, by the monotonic clock, and raises nothing. By the instance's
        thread between two batches, or by ``run``.
        """
        self._run = run
        self._kernel.choose_who_takes()

    def _stand_by(self, wakeup: Wakeup) -> None:
        """All is over for this instance. It has to go on living, if it may still be asked for what it was given."""
        with suppress(RuntimeError):  # the loop has ended, and the server with it
            self._kernel.call_soon_threadsafe(self._return)
            if not (self._kernel.closed or self._is_ended):
                wakeup.wait()

    # ------------------------------------------------------------------ event loop

    def poll(self, wakeup: LoopWakeup) -> list[Ticket] | None:
        """`take` for the event loop: the next batch, owned by the caller, or an empty list now.

        Then ``wakeup`` is woken, once, when it is worth asking again. None when closed.
        """
        self._wakeup, self._on_loop, self._is_away = wakeup, True, False
        if self.closed:
            self._return()
            return None
        try:
            batch = self._ask()
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise InternalError(summary(error)) from error
        if not batch:
            self._park()
        return batch

    def leave(self, wakeup: LoopWakeup) -> None:
        """The executor of ``wakeup`` cannot poll for now; what it was woken for is another's."""
        with suppress(ValueError):
            self._kernel.idle.remove(self)
        self._silence()
        self._is_away = True
        if self.closed:
            self._return()
        self._kernel.ask_again()

    def offer(self) -> bool:
        """Ask for this instance, which is idle no more; whether it need not be asked for again. Event loop only."""
        self._silence()
        self._is_parked = False
        wakeup, kernel, run = self._wakeup, self._kernel, self._run
        assert wakeup is not None
        if run is not None:
            return self._run_what_waits(run)
        if self._on_loop or kernel.threads_take:
            wakeup.wake()  # a thread takes what is there when it is awake, which is more; and hands on what it leaves
            return self._on_loop and not self._is_parked
        batch = self._ask_on_loop()
        if not batch:
            return batch is None
        self._batch = batch
        wakeup.wake()
        return True

    def _run_what_waits(self, run: Callable[[list[Ticket]], int]) -> bool:
        """Run one batch after the other, until nothing waits or the loop has to look at its sockets."""
        until_ns = 0
        while batch := self._ask_on_loop():
            ended_ns = run(batch)
            self.has_run()
            if self.closed:  # meanwhile, when it was not idle
                self._return()
                return True
            until_ns = until_ns or ended_ns + TURN_NS
            if ended_ns >= until_ns or self._run is None:
                self.wake_at = 0
                self._kernel.idle.append(self)
                self._kernel.wake_soon()
                return False
        return batch is None

    def executed(self, took_ns: int) -> None:
        """An execution has taken so long. Any thread."""
        self._kernel.last_ns = took_ns

    @property
    def may_overlap(self) -> bool:
        """Whether the executor may take, one call at a time, while it runs what it has taken before: not where its
        scheduler tells instances apart, nor where what an execution uses is counted from one `take` to the next."""
        return self._kernel.scheduler.instances_alike and not self.is_limited

    @property
    def runs_on_loop(self) -> bool:
        """Whether the event loop runs the batches of an executor that takes them on a thread."""
        return self._run is not None

    def has_run(self) -> None:
        """An execution on the event loop has returned."""

    def _ask_on_loop(self) -> list[Ticket] | None:
        """`_ask`; who gets nothing is parked, and so is, for a while, who gets None, because the scheduler failed."""
        kernel = self._kernel
        try:
            batch = self._ask()
        except BaseException as error:
            log.exception("the scheduler of instance '%s' failed to give it a batch", self.instance.name)
            self.wake_at = inf
            self._alarm = kernel.clock.call_later(RETRY_NS, self.look)
            kernel.idle.append(self)
            if isinstance(error, KeyboardInterrupt):
                raise
            return None
        if not batch:
            self._park()
        return batch

    def wake(self) -> None:
        """Have the executor look by itself. Any thread."""
        assert self._wakeup is not None
        self._wakeup.wake()

    def close(self) -> None:
        """Give out nothing any more; `on_return` follows, now or when the instance has returned. Event loop only."""
        self.closed = True
        try:
            self._kernel.idle.remove(self)
        except ValueError:  # it has something to run, or is about to look
            if not (self._is_away or self._has_returned):
                return
        self._silence()
        self._return()

    def close_when(self, lets_go: Callable[[InstanceInfo], bool]) -> None:
        """`close` as soon as the scheduler lets the instance go, which it is asked before it says what runs next."""
        choose = self._next

        def ask(instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            if not lets_go(instance):
                return choose(instance, now_ns)
            self._kernel.call_soon_threadsafe(self.close)
            return ()

        self._next = ask

    def _return(self) -> None:
        """The instance has returned, and nobody asks for it any more."""
        self._has_returned = True
        told, self.on_return = self.on_return, None
        if told is not None:
            told()
        if self._kernel.closed and not self._is_away:
            self.end()

    def end(self) -> None:
        """Have the executor, which stands by or is idle, look, and find that all is over. Once."""
        if not self._is_ended:
            self._is_ended = True
            self._silence()
            if self._wakeup is not None:
                self.wake()

    def _park(self) -> None:
        kernel, wait = self._kernel, self.wait
        self._is_parked = True
        if wait is None:
            self.wake_at = 0
            # Whom the loop runs need not be woken: it comes before threads, but never before a batch that is formed.
            is_first = self._run is not None and not kernel.forms_batches
            (kernel.idle.appendleft if is_first else kernel.idle.append)(self)
        else:
            self.wake_at = kernel.arrived + wait.rows
            self._alarm = kernel.clock.call_later(wait.delay_ns, self.look)
            kernel.idle.appendleft(self)  # it is forming a batch: arrivals are its business first

    def look(self) -> bool:
        """It is time to ask again; whether it was idle. Event loop only."""
        self._alarm = None
        try:
            self._kernel.idle.remove(self)
        except ValueError:  # another thread has had it look already
            return False
        self.offer()
        return True

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


class Limiter(Protocol):
    """Has instances of several models share what there is not enough of: a
    `headrace.schedulers.rate_limiter.RateLimiter`."""

    def source(self, kernel: Dispatcher, instance: InstanceInfo) -> InstanceSource:
        """Where ``instance`` gets its batches from."""

    def uses(self, instances: Sequence[InstanceInfo]) -> Sequence[ResourceUse]:
        """Who has what of the resources that ``instances`` need. Any thread."""
