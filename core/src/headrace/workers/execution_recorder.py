"""The record of what an instance has done: its statistics, and the observers of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

from headrace.errors import Code, HeadraceError
from headrace.messages.response import Answer
from headrace.messages.ticket import Batch, Padding, Ticket
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
        batch: Sequence[Ticket],
        finished: Sequence[Ticket],
        answers: Sequence[Answer],
        times: BatchTimes,
    ) -> None:
        """``batch`` has run; ``finished`` are those of it that have their last answer."""
        if isinstance(batch, Batch):
            answers = [answer for ticket, answer in zip(finished, answers, strict=True) if not _is_padding(ticket)]
            finished = [ticket for ticket in finished if not _is_padding(ticket)]
            batch = [ticket for ticket in batch if not _is_padding(ticket)]
        succeeded, failed, cancelled = _outcome(finished, answers)
        if len(finished) == len(batch):
            self._batches.record(succeeded, failed, times)
        else:
            self._batches.record_requests(succeeded, failed, times)
            self._batches.record_execution(batch, times)
        self._conclude(self._batches, succeeded, failed, cancelled, times)

    def late(self, ticket: Ticket, answer: Answer) -> None:
        """A last answer has come after its execution."""
        start, now = ticket.started_ns, monotonic_ns()
        times = BatchTimes(start, start, now, now)
        succeeded, failed, cancelled = _outcome([ticket], [answer])
        self._late.record_requests(succeeded, failed, times)
        self._conclude(self._late, succeeded, failed, cancelled, times)

    def _conclude(
        self,
        statistics: ExecutionStatistics,
        succeeded: Sequence[Ticket],
        failed: Sequence[Ticket],
        cancelled: Sequence[Ticket],
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


def _is_padding(ticket: Ticket) -> bool:
    return isinstance(ticket, Padding)


def _outcome(
    tickets: Sequence[Ticket], answers: Sequence[Answer]
) -> tuple[Sequence[Ticket], Sequence[Ticket], Sequence[Ticket]]:
    """Those that succeeded, those that failed, and those whose caller had gone."""
    if not any(isinstance(answer, HeadraceError) for answer in answers):
        return tickets, (), ()
    succeeded: list[Ticket] = []
    failed: list[Ticket] = []
    cancelled: list[Ticket] = []
    for ticket, answer in zip(tickets, answers, strict=True):
        if not isinstance(answer, HeadraceError):
            succeeded.append(ticket)
        elif ticket.cancelled and answer.code is Code.CANCELLED:
            cancelled.append(ticket)
        else:
            failed.append(ticket)
    return succeeded, failed, cancelled
