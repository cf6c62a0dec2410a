"""The record of what an instance has done: its statistics, and the observers of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

from headrace.errors import Code, HeadraceError
from headrace.messages.request import Batch, InferRequest, Padding
from headrace.messages.response import Answer
from headrace.telemetry.observer import Observer
from headrace.telemetry.pacing import paced
from headrace.telemetry.statistics import BatchTimes, ExecutionStatistics

log = paced(__name__)


class ExecutionRecorder:
    """Kept by the worker of instance ``name``. ``statistics`` makes an object for one thread to write:
    batches are recorded by the thread that runs them, late answers on the event loop."""

    def __init__(self, name: str, statistics: Callable[[], ExecutionStatistics]) -> None:
        self.observers: Sequence[Observer] = ()
        self._name = name
        self._batches, self._late = statistics(), statistics()

    def batch(
        self,
        batch: Sequence[InferRequest],
        finished: Sequence[InferRequest],
        answers: Sequence[Answer],
        times: BatchTimes,
    ) -> None:
        """``batch`` has run; ``finished`` are those of it that have their last answer."""
        if isinstance(batch, Batch):
            answers = [answer for request, answer in zip(finished, answers, strict=True) if not _is_padding(request)]
            finished = [request for request in finished if not _is_padding(request)]
            batch = [request for request in batch if not _is_padding(request)]
        succeeded, failed, cancelled = _outcome(finished, answers)
        if len(finished) == len(batch):
            self._batches.record(succeeded, failed, times)
        else:
            self._batches.record_requests(succeeded, failed, times)
            self._batches.record_execution(batch, times)
        self._conclude(self._batches, succeeded, failed, cancelled, times)

    def late(self, request: InferRequest, answer: Answer) -> None:
        """A last answer has come after its execution."""
        start, now = request.started_ns, monotonic_ns()
        times = BatchTimes(start, start, now, now)
        succeeded, failed, cancelled = _outcome([request], [answer])
        self._late.record_requests(succeeded, failed, times)
        self._conclude(self._late, succeeded, failed, cancelled, times)

    def _conclude(
        self,
        statistics: ExecutionStatistics,
        succeeded: Sequence[InferRequest],
        failed: Sequence[InferRequest],
        cancelled: Sequence[InferRequest],
        times: BatchTimes,
    ) -> None:
        """Count those who left, and tell the observers, to whom they have failed."""
        if cancelled:
            statistics.record_cancelled(cancelled, times)
            failed = [*failed, *cancelled]
        for observer in self.observers:
            try:
                observer.batch_finished(succeeded, failed, times)
            except BaseException:  # a stranger's, on the thread that all later batches need
                log.exception("observer %s of instance '%s' failed", type(observer).__name__, self._name)


def _is_padding(request: InferRequest) -> bool:
    return isinstance(request, Padding)


def _outcome(
    requests: Sequence[InferRequest], answers: Sequence[Answer]
) -> tuple[Sequence[InferRequest], Sequence[InferRequest], Sequence[InferRequest]]:
    """Those that succeeded, those that failed, and those whose caller had gone."""
    if not any(isinstance(answer, HeadraceError) for answer in answers):
        return requests, (), ()
    succeeded: list[InferRequest] = []
    failed: list[InferRequest] = []
    cancelled: list[InferRequest] = []
    for request, answer in zip(requests, answers, strict=True):
        if not isinstance(answer, HeadraceError):
            succeeded.append(request)
        elif request.cancelled and answer.code is Code.CANCELLED:
            cancelled.append(request)
        else:
            failed.append(request)
    return succeeded, failed, cancelled
