"""An operation that is not over and has a `headrace.Caller`, and its record when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import BatchTimes, Caller, FinishedInference, InferResponse, Outcome, Watch
from headrace_logging.access_lines import LONGEST, Access
from headrace_logging.line_file import LineFile

if TYPE_CHECKING:
    from headrace import Answer


class RunningOperation(Watch):
    """An operation that is not over."""

    __slots__ = (
        "_caller", "_lines", "_running", "queued_ns", "request_bytes", "request_id", "response_bytes", "responses",
        "times", "version",
    )  # fmt: skip

    def __init__(self, caller: Caller, lines: LineFile, running: dict[Caller, RunningOperation]) -> None:
        self._caller, self._lines, self._running = caller, lines, running
        self.request_id = ""
        self.version = self.request_bytes = self.response_bytes = self.responses = self.queued_ns = 0
        self.times: BatchTimes | None = None

    def answered(self, answer: Answer, final: bool) -> None:
        if isinstance(answer, InferResponse):
            self.responses += 1
            for tensor in answer.outputs.values():
                self.response_bytes += tensor.nbytes

    def ended(self, outcome: Outcome) -> None:
        caller = self._caller
        del self._running[caller]
        # Nothing of this refers to the request, whose body may be large.
        finished = FinishedInference(
            outcome.begun_ns,
            caller.transport,
            caller.peer,
            caller.principal,
            caller.trace_context.get("traceparent", "")[:LONGEST],
            caller.model[:LONGEST],
            self.version,
            self.request_id,
            self.request_bytes,
            None if outcome.error is None else outcome.error.code,
            self.response_bytes,
            outcome.ended_ns,
            self.queued_ns,
            self.times,
        )
        self._lines.add(Access(finished, str(caller.operation), self.responses))
