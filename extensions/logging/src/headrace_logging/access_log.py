"""The access log: a line for each operation, also if it is refused or fails.

::

    AccessLog.recorder           most inferences over HTTP and gRPC: core makes the record
    AccessLog.admit              all others, before the body is read: a `RunningOperation` watches the operation
    AccessLog.intercept          when an inference was read: id, version, bytes
    ExecutionTimes               when an instance has executed it: times in the queue and in the instance
    RunningOperation             with each answer, and at the end: to the file
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace import (
    AnyOperation,
    BatchTimes,
    Caller,
    Engine,
    Extension,
    InferRequest,
    Interceptor,
    PublishedMetric,
    ServerOptions,
    Ticket,
    TimeKeeper,
    Watch,
    hookimpl,
)
from headrace_logging.access_lines import LONGEST
from headrace_logging.access_options import AccessLogOptions
from headrace_logging.running_operation import RunningOperation

if TYPE_CHECKING:
    from headrace import ModelView

WRITTEN, DROPPED = "headrace_access_log_written_total", "headrace_access_log_dropped_total"


class AccessLog(Interceptor):
    """Logs every operation. A call between models is part of its inference."""

    name: ClassVar[str] = "access-log"
    first: ClassVar[bool] = True

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._options = options.group(AccessLogOptions)
        if self.enabled:
            self.recorder = self._lines = self._options.lines
            self._running = self._options.running

    @property
    def enabled(self) -> bool:
        return bool(self._options.file) and self._options.sample == 1

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | None:
        if caller.transport == "model":
            return None
        record = self._running[caller] = RunningOperation(caller, self._lines, self._running)
        return record

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> None:
        record = self._running.get(caller)
        if record is not None:
            record.version, record.request_id = model.version, request.id[:LONGEST]
            # An input that does not fit its shape has no size. The next check refuses it.
            record.request_bytes = sum([getattr(tensor, "nbytes", 0) for tensor in request.inputs.values()])


class SampledAccessLog(AccessLog):
    """Logs one of each ``--access-log-sample`` operations."""

    name: ClassVar[str] = "access-log-sample"

    @property
    def enabled(self) -> bool:
        return bool(self._options.file) and self._options.sample > 1

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.spared = self._options.sample - 1

    def samples(self, operation: AnyOperation, model: object, traceparent: str) -> bool:
        if self.spared:  # core calls it also for operations that are no inferences
            self.spared -= 1
            return False
        self.spared = self._options.sample - 1
        return True


class ExecutionTimes(TimeKeeper):
    """Adds the times of each execution to the records of its requests."""

    def __init__(self, running: Mapping[Caller, RunningOperation]) -> None:
        self._running = running

    def batch_finished(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        for ticket in succeeded:
            ticket.times = times
        if failed or self._running:  # hardly ever
            self._add(succeeded, failed, times)

    def _add(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        """Add ``times`` to the tickets that have failed, and to the records of callers."""
        for tickets in (succeeded, failed):
            for ticket in tickets:
                ticket.times = times
                sender = ticket.request.sender
                record = None if sender is None else self._running.get(sender)
                if record is not None:
                    record.queued_ns, record.times = ticket.queued_ns, times


class AccessLogFile(Extension):
    """Enables execution times, counts the lines, and closes the file when the server has stopped."""

    name: ClassVar[str] = "access-log"
    metrics: ClassVar[Sequence[PublishedMetric]] = (
        PublishedMetric(WRITTEN, "Lines of the access log that were written.", "counter"),
        PublishedMetric(DROPPED, "Lines of the access log that were dropped.", "counter"),
    )

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._options = engine.options.group(AccessLogOptions)

    @property
    def enabled(self) -> bool:
        return bool(self._options.file)

    @hookimpl
    def observe_model(self) -> ExecutionTimes:
        return ExecutionTimes(self._options.running)

    def measure(self) -> Mapping[str, float]:
        lines = self._options.lines
        return {WRITTEN: lines.written, DROPPED: lines.dropped}

    def close(self) -> None:
        self._options.lines.close()
