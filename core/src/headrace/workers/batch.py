"""One execution: who drives the instance, and who of the batch is still there to be answered.

Everything here runs on the instance's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from headrace.backends.base import AnyInstance, DeferredInstance, Instance, RequestInstance, StreamInstance
from headrace.errors import BackendError, Cancelled
from headrace.messages.ticket import Ticket
from headrace.telemetry.statistics import BatchTimes
from headrace.workers.deferred import DeferredRunner
from headrace.workers.output_schema import OutputSchema
from headrace.workers.requests import RequestRunner
from headrace.workers.rows import RowsRunner
from headrace.workers.runner import Given, Runner
from headrace.workers.stream import StreamRunner


def runner_for(instance: AnyInstance, schema: OutputSchema) -> Runner:
    """The runner for the rung that ``instance`` stands on; asked once, at load."""
    if isinstance(instance, Instance):
        return RowsRunner(schema, instance)
    if isinstance(instance, RequestInstance):
        return RequestRunner(schema, instance)
    if isinstance(instance, StreamInstance):
        return StreamRunner(schema, instance)
    if isinstance(instance, DeferredInstance):
        return DeferredRunner(schema, instance)
    raise BackendError(
        f"model '{schema.name}': {type(instance).__name__} is no Instance, RequestInstance, StreamInstance or "
        "DeferredInstance"
    )


def run_batch(runner: Runner, batch: Sequence[Ticket]) -> tuple[Sequence[Given], BatchTimes]:
    """Run those of ``batch`` whose callers are still there; the others get `Cancelled`."""
    if not any(ticket.cancelled for ticket in batch):
        return runner.run(batch)
    alive = [ticket for ticket in batch if ticket.pinned or not ticket.cancelled]
    now = monotonic_ns()
    answers, times = runner.run(alive) if alive else ((), BatchTimes(now, now, now, now))
    answered = iter(answers)
    return [
        next(answered)
        if ticket.pinned or not ticket.cancelled
        else Cancelled(f"{ticket.request.log_id}request was cancelled")
        for ticket in batch
    ], times
