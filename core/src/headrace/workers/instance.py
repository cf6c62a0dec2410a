"""The thread of one instance: it loads, then pulls a batch, runs it and hands it back, for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from headrace.backends.base import AnyInstance, BaseInstance
from headrace.errors import InternalError, summary
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.observer import Observer
from headrace.telemetry.pacing import paced
from headrace.telemetry.statistics import ExecutionStatistics
from headrace.workers.batch import run_batch
from headrace.workers.execution_recorder import ExecutionRecorder
from headrace.workers.instance_loading import close_instance
from headrace.workers.loop_mailbox import LoopSink
from headrace.workers.runner import LATER, Given, Runner
from headrace.workers.worker import BatchSource, Wakeup

log = paced(__name__)

#: How long after a failure of its scheduler an instance asks it again.
_RETRY_S = 1.0


class InstanceThread:
    """Owns one instance from load to close; all of its methods run on this thread.

    ``load`` returns the instance, warmed up, and its runner. A `headrace.workers.worker.Worker`: nothing that
    an instance, an observer or a scheduler raises ends the thread, so it is alive from load to close.
    """

    reason = ""
    restarts = 0

    def __init__(
        self,
        name: str,
        load: Callable[[], tuple[AnyInstance, Runner]],
        statistics: Callable[[], ExecutionStatistics],
    ) -> None:
        self.name = name
        self.instance: AnyInstance | None = None
        self.has_check = False
        self.executing: Sequence[Ticket] = ()
        self._load = load
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

    def check_ready(self) -> bool:
        instance = self.instance
        return instance is not None and instance.is_ready()

    def _main(self) -> None:
        try:
            self.instance, runner = self._load()
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
            try:
                self.executing = batch
                given, times = run_batch(runner, batch)
                self.executing = ()
                finished, answers = _finished(batch, given)
                self._recorder.batch(batch, finished, answers, times)
                sink.deliver(finished, answers)
            except BaseException as error:  # not the instance's: that is an answer
                log.exception("instance '%s' could not see a batch through", self.name)
                given, finished, answers, self.executing = (), [], (), ()
                sink.deliver(batch, [InternalError(summary(error))] * len(batch))
            del batch, given, finished, answers  # while this thread waits, their memory is not its to keep


def _finished(batch: list[Ticket], given: Sequence[Given]) -> tuple[list[Ticket], Sequence[Answer]]:
    """Those of ``batch`` that are answered, and their answers."""
    if LATER not in given:
        return batch, given  # type: ignore[return-value]  # looked at in one go: this is every batch's way
    pairs = [(ticket, answer) for ticket, answer in zip(batch, given, strict=True) if answer is not LATER]
    return [ticket for ticket, _ in pairs], [answer for _, answer in pairs]
