"""The thread of one instance: it loads, then pulls a batch, runs it and hands it back, for ever."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from penstock.backends.base import AnyInstance
from penstock.errors import PenstockError
from penstock.messages.request import InferRequest
from penstock.messages.response import Answer, InferResponse
from penstock.telemetry.observer import Observer
from penstock.telemetry.statistics import BatchTimes, ExecutionStatistics
from penstock.workers.batch import run_batch
from penstock.workers.bell import Bell
from penstock.workers.runner import Runner

log = logging.getLogger(__name__)


class BatchSource(Protocol):
    """Where batches come from and go back to: a scheduler."""

    def take(self, bell: Bell) -> list[InferRequest] | None: ...

    def progress(self, request: InferRequest, response: InferResponse) -> None: ...

    def deliver(self, requests: Sequence[InferRequest], answers: Sequence[Answer]) -> None: ...


class InstanceThread:
    """Owns one instance from load to close; all of its methods run on this thread.

    ``load`` returns the instance, warmed up, and its runner.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], tuple[AnyInstance, Runner]],
        statistics: ExecutionStatistics,
    ) -> None:
        self.name = name
        self.instance: AnyInstance | None = None
        self._load = load
        self._statistics = statistics
        self._observers: Sequence[Observer] = ()
        self._source: Future[tuple[BatchSource, asyncio.AbstractEventLoop] | None] = Future()
        self._loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name=f"penstock-{name}", daemon=True)

    def load(self) -> None:
        """Start the thread and wait until the instance is loaded; raises what loading raised."""
        self._thread.start()
        self._loaded.result()

    def serve(self, source: BatchSource, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer] = ()) -> None:
        """Begin to pull from ``source`` and to deliver on ``loop``; ``observers`` see each batch."""
        self._observers = observers
        self._source.set_result((source, loop))

    def join(self) -> None:
        """Wait until the instance has closed. The source must have been closed before."""
        if not self._source.done():
            self._source.set_result(None)
        self._thread.join()

    def is_ready(self) -> bool:
        return self.instance is not None and self.instance.is_ready()

    def _main(self) -> None:
        try:
            self.instance, runner = self._load()
        except BaseException as error:  # reported to whoever waits in load()
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(None)
        try:
            if (source := self._source.result()) is not None:
                self._serve(runner, *source)
        finally:
            instance, self.instance = self.instance, None
            instance.close()

    def _serve(self, runner: Runner, source: BatchSource, loop: asyncio.AbstractEventLoop) -> None:
        bell = Bell()

        def progress(request: InferRequest, response: InferResponse) -> None:
            loop.call_soon_threadsafe(source.progress, request, response)

        runner.connect(progress)
        while (batch := source.take(bell)) is not None:
            answers, times = run_batch(runner, batch)
            self._record(batch, answers, times)
            loop.call_soon_threadsafe(source.deliver, batch, answers)
            del batch, answers  # while this thread waits, their memory is not its to keep

    def _record(self, batch: list[InferRequest], answers: Sequence[Answer], times: BatchTimes) -> None:
        succeeded: list[InferRequest] = batch
        failed: list[InferRequest] = []
        if any(isinstance(answer, PenstockError) for answer in answers):
            pairs = list(zip(batch, answers, strict=True))
            failed = [request for request, answer in pairs if isinstance(answer, PenstockError)]
            succeeded = [request for request, answer in pairs if not isinstance(answer, PenstockError)]
        self._statistics.record(succeeded, failed, times)
        for observer in self._observers:
            try:
                observer.batch_finished(succeeded, failed, times)
            except Exception:
                log.exception("observer %s of instance '%s' failed", type(observer).__name__, self.name)
