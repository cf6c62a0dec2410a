"""The executor on threads of the server. It may also let the event loop run its instance."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic_ns

from headrace.backends.base import AnyInstance, BaseInstance, Instance, RequestInstance
from headrace.errors import InternalError, summary
from headrace.executors.executor import BatchSource, Deliver, RunsOn
from headrace.executors.instance import ExecutionRecorder, close_instance, run_batch
from headrace.executors.loop_policy import LoopPolicy
from headrace.executors.loop_sink import LoopSink
from headrace.executors.runner import LATER, Returned, Runner
from headrace.executors.threads import Wakeup, continue_with, started
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import BatchTimes, ExecutionCounter, Observer
from headrace.telemetry.log_limits import rate_limited_logger
from headrace.telemetry.log_output import set_thread_model

log = rate_limited_logger(__name__)

#: If its scheduler fails, an instance calls it again after 1 s.
_RETRY_S = 1.0


class BatchThread:
    """The state of one thread that runs batches of an instance. An instance that takes several calls at once has
    several."""

    __slots__ = ("executing", "recorder", "wakeup")

    def __init__(self, recorder: ExecutionRecorder) -> None:
        self.executing: Sequence[Ticket] = ()
        self.recorder = recorder
        self.wakeup = Wakeup()


class InstanceThread:
    """The thread of one instance: it loads, then takes a batch, runs it and delivers it, until it closes.

    All methods of the instance run on this thread, with two exceptions:

    - With ``on_loop``, the event loop runs the batches while the thread sleeps. The two never run at the same time. If
      ``on_loop`` is True, this holds from load to close. If it is a policy and the instance has
      `BaseInstance.any_thread`, the policy decides.
    - If the instance has a `BaseInstance.concurrency` above 1, more threads take batches in turn, and each runs its
      own.

    ``load`` returns the instance, warmed up, and its runner. Nothing that an instance, an observer or a scheduler
    raises ends the thread, so it is alive from load to close.
    """

    reason = ""
    restarts = 0
    runs_on: RunsOn = "thread"

    def __init__(
        self,
        name: str,
        load: Callable[[], tuple[AnyInstance, Runner]],
        statistics: Callable[[], ExecutionCounter],
        on_loop: bool | LoopPolicy = False,
    ) -> None:
        self.name = name
        self._on_loop = on_loop
        if on_loop is True:
            self.runs_on = "event_loop"
        self.instance: AnyInstance | None = None
        self.has_check = False
        self._load = load
        self._runner: Runner | None = None
        self._statistics = statistics
        #: The first is this thread, or the event loop instead of it.
        self._threads = [BatchThread(ExecutionRecorder(name, statistics))]
        self._source: Future[tuple[BatchSource, asyncio.AbstractEventLoop] | None] = Future()
        self._is_leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def load(self) -> None:
        """Load the instance on its thread. Raises what loading raised.

        The calling thread becomes the thread of the instance, if `continue_with` allows it. This saves the start of a
        thread. It serves after its current work.
        """
        name = f"headrace-{self.name}"
        self._thread = continue_with(self._serve_and_close)
        if self._thread is None:
            started(self.load, name).result()
            return
        self._thread.name = name
        self.instance, self._runner = self._load()
        self.has_check = type(self.instance).is_ready is not BaseInstance.is_ready

    def serve(self, source: BatchSource, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer] = ()) -> None:
        """Start to take batches from ``source`` and to deliver on ``loop``. Each batch is reported to ``observers``."""
        source.calls_at_once = self._calls_at_once(source)
        more = source.calls_at_once - 1
        self._threads += [BatchThread(ExecutionRecorder(self.name, self._statistics)) for _ in range(more)]
        for each in self._threads:
            each.recorder.observers = observers
        self._source.set_result((source, loop))

    def join(self) -> None:
        """Wait until the instance has closed. Close the source first."""
        self._is_leaving.set()
        if not self._source.done():
            self._source.set_result(None)
        if self._thread is threading.current_thread():
            self._serve_and_close()
        elif self._thread is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self.instance is not None

    @property
    def executing(self) -> Sequence[Ticket]:
        return [ticket for each in self._threads for ticket in each.executing]

    @property
    def unanswered(self) -> Sequence[Ticket]:
        return () if self._runner is None else self._runner.unanswered

    @property
    def takes_device_tensors(self) -> bool:
        return self._runner is not None and self._runner.takes_device_tensors

    def check_ready(self) -> bool:
        instance = self.instance
        return instance is not None and instance.is_ready()

    def _serve_and_close(self) -> None:
        """Serve until it is time to close. Does nothing if the instance is closed, or could not be loaded."""
        runner = self._runner
        if self.instance is None or runner is None:
            return
        try:
            if (source := self._source.result()) is not None:
                self._serve(runner, *source)
        finally:
            instance, self.instance = self.instance, None
            runner.close()
            close_instance(instance, self.name)

    def _serve(self, runner: Runner, source: BatchSource, loop: asyncio.AbstractEventLoop) -> None:
        own, *others = self._threads
        sink = LoopSink(source, loop, own.recorder.late)
        runner.connect(sink)
        if others:
            self._take_turns(runner, source, sink)
            return
        run_on_loop: Callable[[list[Ticket]], int] = partial(self._run_on_loop, runner, source, sink)
        policy = None
        if self._on_loop is True:
            source.run_on_loop(run_on_loop)
            self._note("event_loop")
        elif self._on_loop and may_run_on_loop(self.instance):
            policy = self._on_loop
            run_on_loop = partial(self._run_while_short, runner, source, sink, policy)
        while (batch := self._take(own, source)) is not None:
            times = self._run(own, runner, batch, source, sink.deliver)
            if policy is not None and policy.ran(times.start_ns, times.end_ns):
                source.run_on_loop(run_on_loop)
                self._note("event_loop")
            del batch  # its memory must be free while this thread waits

    def _take(self, thread: BatchThread, source: BatchSource) -> list[Ticket] | None:
        """Return the next batch, or None when it is time to close."""
        while True:
            try:
                return source.take(thread.wakeup)
            except BaseException:
                log.exception("the scheduler of instance '%s' raised an exception in next()", self.name)
                if self._is_leaving.wait(_RETRY_S):
                    return None
                thread.wakeup = Wakeup()  # the old one may still be woken

    # ------------------------------------------------------------------ several calls at once

    def _calls_at_once(self, source: BatchSource) -> int:
        """Return 1 if the event loop runs the instance, or if it must run one batch at a time. Else its concurrency."""
        instance = self.instance
        if self._on_loop is True or not (isinstance(instance, Instance | RequestInstance) and source.may_overlap):
            return 1
        return max(1, instance.concurrency)

    def _take_turns(self, runner: Runner, source: BatchSource, sink: LoopSink) -> None:
        """Take and run batches on all threads. Return when they have ended."""
        turn = threading.Lock()  # one thread at a time takes a batch
        several = threading.Event()  # set while others than the first run batches
        log.info("instance '%s' runs up to %d batches at once", self.name, len(self._threads))
        others = [
            threading.Thread(
                target=self._run_in_turn,
                args=(number, runner, source, sink, turn, several),
                name=f"headrace-{self.name}-{number}",
                daemon=True,
            )
            for number in range(1, len(self._threads))
        ]
        for other in others:
            other.start()
        self._run_in_turn(0, runner, source, sink, turn, several)
        for other in others:
            other.join()

    def _run_in_turn(
        self,
        number: int,
        runner: Runner,
        source: BatchSource,
        sink: LoopSink,
        turn: threading.Lock,
        several: threading.Event,
    ) -> None:
        set_thread_model(runner.schema.name)
        thread, wait = self._threads[number], self.instance.wait_to_take  # type: ignore[union-attr]
        while not number or source.calls_at_once > 1 or several.wait():
            with turn:
                try:
                    source.calls_at_once = wait() or len(self._threads)
                except BaseException:
                    log.exception("instance '%s' raised an exception in wait_to_take()", self.name)
                if source.calls_at_once > 1:
                    several.set()
                else:
                    several.clear()
                if number and source.calls_at_once == 1 and not self._is_leaving.is_set():
                    continue
                batch = self._take(thread, source)
            if batch is None:
                self._is_leaving.set()
                several.set()
                return
            self._run(thread, runner, batch, source, sink.deliver)
            del batch

    # ------------------------------------------------------------------ the event loop

    def _run_on_loop(self, runner: Runner, source: BatchSource, sink: LoopSink, batch: list[Ticket]) -> int:
        """Run ``batch`` on the event loop, while the thread sleeps. Return the time at which it ended."""
        set_thread_model(runner.schema.name)
        return self._run(self._threads[0], runner, batch, source, sink.deliver_now).end_ns

    def _run_while_short(
        self, runner: Runner, source: BatchSource, sink: LoopSink, policy: LoopPolicy, batch: list[Ticket]
    ) -> int:
        """Like `_run_on_loop`, until ``policy`` moves the next batch to the thread."""
        set_thread_model(runner.schema.name)
        times = self._run(self._threads[0], runner, batch, source, sink.deliver_now)
        if not policy.ran(times.start_ns, times.end_ns):
            source.run_on_loop(None)
            self._note("thread")
        return times.end_ns

    def _note(self, runs_on: RunsOn) -> None:
        self.runs_on = runs_on
        log.info("instance '%s' runs on %s", self.name, "the event loop" if runs_on == "event_loop" else "its thread")

    # ------------------------------------------------------------------ one batch

    def _run(
        self, thread: BatchThread, runner: Runner, batch: list[Ticket], source: BatchSource, deliver: Deliver
    ) -> BatchTimes:
        """Run ``batch`` and deliver its answers. Return the times of its execution."""
        try:
            thread.executing = batch
            returned, times = run_batch(runner, batch)
            thread.executing = ()
            source.executed(times.end_ns - times.start_ns)
            finished, answers = _finished(batch, returned)
            thread.recorder.batch(batch, finished, answers, times)
            deliver(finished, answers)
        except BaseException as error:  # not from the instance, whose exceptions are answers
            log.exception("instance '%s' failed to deliver a batch", self.name)
            thread.executing = ()
            deliver(batch, [InternalError(summary(error))] * len(batch))
            return BatchTimes(*[monotonic_ns()] * 4)
        return times


def _finished(batch: list[Ticket], answers: Sequence[Returned]) -> tuple[list[Ticket], Sequence[Answer]]:
    """Return the answered requests of ``batch``, and their answers."""
    if LATER not in answers:
        return batch, answers  # type: ignore[return-value]  # looked at in one go: this is every batch's way
    pairs = [(ticket, answer) for ticket, answer in zip(batch, answers, strict=True) if answer is not LATER]
    return [ticket for ticket, _ in pairs], [answer for _, answer in pairs]


def may_run_on_loop(instance: AnyInstance | None) -> bool:
    """True if ``instance`` is of a kind that the event loop may run, and allows it."""
    return isinstance(instance, Instance | RequestInstance) and instance.any_thread
