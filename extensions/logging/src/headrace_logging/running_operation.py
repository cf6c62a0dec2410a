"""An operation that is not over, and its record when it is."""

from __future__ import annotations

from time import time_ns
from typing import TYPE_CHECKING

from headrace import Caller, InferResponse, Outcome, Watch
from headrace_logging.access_file import AccessFile
from headrace_logging.access_lines import LONGEST, Access

if TYPE_CHECKING:
    from headrace import Answer


class RunningOperation(Watch):
    """An operation that is not over."""

    __slots__ = (
        "_caller", "_lines", "_running", "compute_ns", "queue_ns", "request_bytes", "request_id", "response_bytes",
        "responses", "version",
    )  # fmt: skip

    def __init__(self, caller: Caller, lines: AccessFile, running: dict[Caller, RunningOperation]) -> None:
        self._caller, self._lines, self._running = caller, lines, running
        self.request_id = ""
        self.version = self.request_bytes = self.response_bytes = self.responses = 0
        self.queue_ns = self.compute_ns = -1

    def answered(self, answer: Answer, final: bool) -> None:
        if isinstance(answer, InferResponse):
            self.responses += 1
            for tensor in answer.outputs.values():
                self.response_bytes += tensor.nbytes

    def ended(self, outcome: Outcome) -> None:
        caller = self._caller
        del self._running[caller]
        # Nothing of this refers to the request, whose body may be large.
        self._lines.add(
            Access(
                time_ns(),
                caller.transport,
                caller.peer,
                caller.principal,
                str(caller.operation),
                caller.model[:LONGEST],
                self.version,
                self.request_id,
                "ok" if outcome.error is None else outcome.error.code.value,
                self.request_bytes,
                self.response_bytes,
                self.responses,
                outcome.ended_ns - outcome.begun_ns,
                self.queue_ns,
                self.compute_ns,
                caller.trace_context.get("traceparent", "")[:LONGEST],
            )
        )
