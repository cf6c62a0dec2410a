"""What runs an instance, where its batches come from, and `InstanceThread`, the worker that is a thread of the server.

`headrace.workers.process` has the worker whose instance lives in a process of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic_ns
from typing import Literal, Protocol, TypeAlias

from headrace.backends.base import AnyInstance, BaseInstance, Instance, RequestInstance
from headrace.errors import InternalError, summary
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import BatchTimes, ExecutionCounter, Observer
from headrace.telemetry.log_output import speak_for, speak_for_nobody
from headrace.telemetry.pacing import paced
from headrace.workers.instance import ExecutionRecorder, close_instance, run_batch
from headrace.workers.loop_policy import LoopPolicy
from headrace.workers.runner import LATER, Given, Runner
from headrace.workers.threads import LoopMailbox, LoopWakeup, Wakeup

log = paced(__name__)

#: How long after a failure of its scheduler an instance asks it again.
_RETRY_S = 1.0

#: Gives out last answers.
Deliver: TypeAlias = Callable[[Sequence[Ticket], Sequence[Answer]], None]
#: What runs the batches of an instance.
RunsOn: TypeAlias = Literal["event_loop", "thread", "process"]


class BatchSource(Protocol):
    """Where batches come from and go back to: a `headrace.schedulers.instance_source.InstanceSource`.

    A worker on a thread of its own takes batches, one that lives on the event loop polls for them; a
    wakeup tells either when to look again. A worker with a thread may have the event loop run its batches.
    """

    def take(self, wakeup: Wakeup) -> list[Ticket] | None: ...

    def run_on_loop(self, run: Callable[[list[Ticket]], int] | None) -> None: ...

    def poll(self, wakeup: LoopWakeup) -> list[Ticket] | None: ...

    def leave(self, wakeup: LoopWakeup) -> None: ...

    def progress(self, ticket: Ticket, response: Answer) -> None:
        """An answer that is not the last. Event loop only."""

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """Last answers. Event loop only."""


class Worker(Protocol):
    """One instance, from load to close. The loading thread calls `load`, `serve` and `join`."""

    @property
    def name(self) -> str:
        """The instance's."""

    @property
    def runs_on(self) -> RunsOn:
        """Where it executes now. Any thread."""

    @property
    def alive(self) -> bool:
        """Whether the instance can execute. False before `load`, and between a crash and the restart."""

    @property
    def reason(self) -> str:
        """Why it is not alive, or last was not: one line, then the last traceback. Empty if it always was."""

    @property
    def restarts(self) -> int:
        """How often the instance has been loaded again after it had died."""

    @property
    def executing(self) -> Sequence[Ticket]:
        """The batch that keeps the instance from taking another; empty while it is free."""

    @property
    def held(self) -> Sequence[Ticket]:
        """Requests that the instance has, and whose last answers are to come after their execution has returned."""

    @property
    def has_check(self) -> bool:
        """Whether the instance has something of its own to say in `check_ready`."""

    def load(self) -> None:
        """Wait until the instance is loaded and warmed up; raises what loading raised."""

    def serve(self, source: BatchSource, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer] = ()) -> None:
        """Begin to pull batches from ``source`` and to deliver on ``loop``."""

    def join(self) -> None:
        """Wait until the instance has closed. The source must have been closed before."""

    def check_ready(self) -> bool:
        """What the instance's ``is_ready`` says now; False while it is not `alive`.

        May block for as long as the instance's author likes, and raise what that author raises:
        call it on a thread of its own, one call at a time.
        """


class InstanceThread:
    """The thread of one instance: it loads, then pulls a batch, runs it and hands it back, until it closes.

    All methods of the instance run on it. Only, with ``on_loop``, the event loop runs the batches, and the thread
    sleeps meanwhile: it has the instance whenever it is awake, and the loop whenever it is not. That is from load to
    close, or, where ``on_loop`` is a policy and the instance says `BaseInstance.any_thread`, whenever the policy says
    so.

    ``load`` returns the instance, warmed up, and its runner. A `Worker`: nothing that
    an instance, an observer or a scheduler raises ends the thread, so it is alive from load to close.
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
        self.executing: Sequence[Ticket] = ()
        self._load = load
        self._runner: Runner | None = None
        self._recorder = ExecutionRecorder(name, statistics)
        self._source: Future[tuple[BatchSource, asyncio.AbstractEventLoop] | None] = Future()
        self._loaded: Future[None] = Future()
        self._is_leaving = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"headrace-{name}", daemon=True)

    def load(self) -> None:
        """Start the thread and wait until the instance is loaded; raises what loading raised."""
        self._thread.start()
        self._loaded.result()

    def serve(self, source: BatchSource, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer] = ()) -> None:
        """Begin to pull from ``source`` and to deliver on ``loop``; ``observers`` see each batch."""
        self._recorder.observers = observers
        self._source.set_result((source, loop))

    def join(self) -> None:
        """Wait until the instance has closed. The source must have been closed before."""
        self._is_leaving.set()
        if not self._source.done():
            self._source.set_result(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self.instance is not None

    @property
    def held(self) -> Sequence[Ticket]:
        return () if self._runner is None else self._runner.held

    def check_ready(self) -> bool:
        instance = self.instance
        return instance is not None and instance.is_ready()

    def _main(self) -> None:
        try:
            self.instance, runner = self._load()
            self._runner = runner
        except BaseException as error:  # reported to whoever waits in load()
            self._loaded.set_exception(error)
            return
        self.has_check = type(self.instance).is_ready is not BaseInstance.is_ready
        self._loaded.set_result(None)
        try:
            if (source := self._source.result()) is not None:
                self._serve(runner, *source)
        finally:
            instance, self.instance = self.instance, None
            runner.close()
            close_instance(instance, self.name)

    def _serve(self, runner: Runner, source: BatchSource, loop: asyncio.AbstractEventLoop) -> None:
        wakeup = Wakeup()
        sink = LoopSink(source, loop, self._recorder.late)
        runner.connect(sink)
        run_on_loop: Callable[[list[Ticket]], int] = partial(self._run_on_loop, runner, sink)
        policy = None
        if self._on_loop is True:
            source.run_on_loop(run_on_loop)
            self._note("event_loop")
        elif self._on_loop and may_run_on_loop(self.instance):
            policy = self._on_loop
            run_on_loop = partial(self._run_while_short, runner, source, sink, policy)
        while True:
            try:
                batch = source.take(wakeup)
            except BaseException:
                log.exception("the scheduler of instance '%s' failed to give it a batch", self.name)
                if self._is_leaving.wait(_RETRY_S):
                    return
                wakeup = Wakeup()  # nobody knows who has the other
                continue
            if batch is None:
                return
            times = self._run(runner, batch, sink.deliver)
            if policy is not None and policy.ran(times.start_ns, times.end_ns):
                source.run_on_loop(run_on_loop)
                self._note("event_loop")
            del batch  # while this thread waits, its memory is not its to keep

    def _run_on_loop(self, runner: Runner, sink: LoopSink, batch: list[Ticket]) -> int:
        """Run ``batch``; return when it was through. On the event loop, while the thread sleeps."""
        speak_for(runner.schema.name)
        return self._run(runner, batch, sink.deliver_now).end_ns

    def _run_while_short(
        self, runner: Runner, source: BatchSource, sink: LoopSink, policy: LoopPolicy, batch: list[Ticket]
    ) -> int:
        """`_run_on_loop`, until ``policy`` has the thread run the next batch."""
        speak_for(runner.schema.name)
        times = self._run(runner, batch, sink.deliver_now)
        if not policy.ran(times.start_ns, times.end_ns):
            source.run_on_loop(None)
            self._note("thread")
        return times.end_ns

    def _note(self, runs_on: RunsOn) -> None:
        self.runs_on = runs_on
        log.info("instance '%s' runs on %s", self.name, "the event loop" if runs_on == "event_loop" else "its thread")

    def _run(self, runner: Runner, batch: list[Ticket], deliver: Deliver) -> BatchTimes:
        """Run ``batch`` and have the answers delivered; return when it was executed."""
        try:
            self.executing = batch
            given, times = run_batch(runner, batch)
            self.executing = ()
            finished, answers = _finished(batch, given)
            self._recorder.batch(batch, finished, answers, times)
            deliver(finished, answers)
        except BaseException as error:  # not the instance's: that is an answer
            log.exception("instance '%s' could not see a batch through", self.name)
            self.executing = ()
            deliver(batch, [InternalError(summary(error))] * len(batch))
            return BatchTimes(*[monotonic_ns()] * 4)
        return times


def _finished(batch: list[Ticket], given: Sequence[Given]) -> tuple[list[Ticket], Sequence[Answer]]:
    """Those of ``batch`` that are answered, and their answers."""
    if LATER not in given:
        return batch, given  # type: ignore[return-value]  # looked at in one go: this is every batch's way
    pairs = [(ticket, answer) for ticket, answer in zip(batch, given, strict=True) if answer is not LATER]
    return [ticket for ticket, _ in pairs], [answer for _, answer in pairs]


def may_run_on_loop(instance: AnyInstance | None) -> bool:
    """Whether ``instance`` stands on a rung, and says of itself, that the event loop may run it."""
    return isinstance(instance, Instance | RequestInstance) and instance.any_thread


class LoopSink:
    """A `headrace.workers.runner.AnswerSink` to ``source``, which is told everything in the order sent.

    ``on_late`` is called on the loop for each last answer that was sent, before it is given out. When
    the loop has ended, the server has stopped without waiting for this instance: then nobody is left
    to be answered.
    """

    def __init__(
        self, source: BatchSource, loop: asyncio.AbstractEventLoop, on_late: Callable[[Ticket, Answer], None]
    ) -> None:
        self._source, self._on_late = source, on_late
        self._mailbox = LoopMailbox(loop)

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        ticket.respond_at_once = None  # what comes after this must not pass it
        self._mailbox.send(self._end if final else self._source.progress, ticket, answer)

    def deliver(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """Give out a batch of last answers, behind what was sent before; to threads that wait, at once."""
        self._give_at_once(tickets, answers)
        self._mailbox.send(self._source.deliver, tickets, answers)

    @staticmethod
    def _give_at_once(tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        for ticket, answer in zip(tickets, answers, strict=True):
            at_once = ticket.respond_at_once  # which the loop may take away at any time
            if at_once is not None and isinstance(answer, InferResponse):
                at_once(answer)

    def deliver_now(self, tickets: Sequence[Ticket], answers: Sequence[Answer]) -> None:
        """`deliver`, on the event loop, which has run the batch, before this returns."""
        speak_for_nobody()
        self._mailbox.flush()
        self._give_at_once(tickets, answers)
        try:
            self._source.deliver(tickets, answers)
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.exception("a batch could not be delivered")

    def _end(self, ticket: Ticket, answer: Answer) -> None:
        self._on_late(ticket, answer)
        self._source.deliver((ticket,), (answer,))
