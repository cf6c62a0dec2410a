"""The destination of traces: the common interface of a trace file and OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace import Caller
    from headrace_trace.recording import RequestTrace, TracedCall


class Exporter(Protocol):
    """Takes the traces of one server. Nothing here may block, except `close`."""

    #: Traces that were written or sent, and that were dropped.
    written: int
    dropped: int

    def follows(self, traceparent: str) -> bool:
        """True if ``traceparent`` is valid, so that its request is traced at any rate."""

    def begin(self, call: TracedCall, caller: Caller) -> None:
        """Note that ``call`` begins. Event loop only."""

    def export(self, trace: RequestTrace) -> None:
        """Write the calls of ``trace``, which are over. Event loop only."""

    def close(self) -> None:
        """Write what is left. Blocks for at most a few seconds."""
