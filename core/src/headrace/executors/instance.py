"""Load an instance, run batches on it, record their statistics, and close it: for all kinds of executors.

A backend is foreign code. Everything that it raises, even `SystemExit`, is an error of its model and of nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic_ns
from typing import Any

from headrace.backends.base import (
    AnyInstance,
    Backend,
    DeferredInstance,
    Instance,
    Model,
    RequestInstance,
    StreamInstance,
)
from headrace.config.padding import PADDING, PaddingRules
from headrace.errors import BackendError, Code, ConfigError, HeadraceError, LoadError, Rescheduled, summary
from headrace.executors.output_schema import OutputSchema
from headrace.executors.padded import PaddedRequests, PaddedRunner
from headrace.executors.ragged import RaggedLayout, RaggedRunner
from headrace.executors.runner import DeviceRowsRunner, RequestRunner, Returned, RowsRunner, Runner, cancelled
from headrace.executors.stream_runners import DeferredRunner, StreamRunner
from headrace.messages.response import Answer
from headrace.messages.ticket import Batch, Padding, Ticket
from headrace.telemetry.executions import BatchTimes, ExecutionCounter, Observer
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)


def share(backend: Backend, model: Model, undo: ExitStack, logger: logging.Logger | None = None) -> Any:
    """Return what the instances of ``model`` share, and add its release to ``undo``. Raises as `backend_errors`."""
    with backend_errors(backend, model.name, logger):
        shared = backend.share(model)
    undo.callback(_unshare, backend, model.name, shared)
    return shared


def load_instance(backend: Backend, model: Model) -> AnyInstance:
    """Return an instance of ``model``, warmed up. If that fails, close it and raise what the backend raised."""
    instance: object = backend.load(model)
    if not isinstance(instance, AnyInstance):
        kinds = "an Instance, RequestInstance, StreamInstance or DeferredInstance"
        raise BackendError(f"load() of backend '{backend.name}' returned {type(instance).__name__}, expected {kinds}")
    try:
        instance.warm_up()
    except BaseException:
        close_instance(instance, model.instance_name)
        raise
    return instance


def close_instance(instance: AnyInstance, name: str) -> None:
    """Close ``instance`` and log its exceptions."""
    try:
        instance.close()
    except BaseException:
        log.exception("model instance '%s' failed to close", name)


@contextmanager
def backend_errors(backend: Backend, model: str, logger: logging.Logger | None = None) -> Iterator[None]:
    """Turn an exception of ``backend`` for ``model`` into a `LoadError`, unless it is a `HeadraceError`.

    ``logger`` logs the traceback. A child process has none, because it sends the traceback to its server.
    """
    try:
        yield
    except HeadraceError:
        raise
    except BaseException as error:
        if logger is not None:
            logger.error("backend '%s' failed to load '%s'", backend.name, model, exc_info=error)
        raise LoadError(f"backend '{backend.name}' failed to load '{model}': {summary(error)}") from error


def _unshare(backend: Backend, model: str, shared: Any) -> None:
    try:
        backend.unshare(shared)
    except BaseException:
        log.exception("backend '%s' failed to release what the instances of '%s' share", backend.name, model)


def runner_for(
    instance: AnyInstance, schema: OutputSchema, shaping: RaggedLayout | PaddingRules | None = None
) -> Runner:
    """Return the runner for the kind of ``instance``. Called once, at load.

    ``shaping`` is the result of `shaping_of`. Raises `ConfigError` if the config fills up batches but the instance gets
    one request at a time.
    """
    if isinstance(instance, Instance):
        if isinstance(shaping, PaddingRules):
            return PaddedRunner(schema, instance, shaping)
        plain = DeviceRowsRunner if instance.takes_device_tensors else RowsRunner
        return plain(schema, instance) if shaping is None else RaggedRunner(schema, instance, shaping)
    runner = _requests_runner(instance, schema)
    if not isinstance(shaping, PaddingRules):
        return runner
    if shaping.row_buckets and isinstance(instance, StreamInstance):
        raise ConfigError(
            f"model '{schema.name}': parameter '{PADDING}': pad_batch_to is for backends that are given batches, and "
            "this one is given one request after the other",
            field=f"parameters['{PADDING}']",
        )
    return PaddedRequests(runner, shaping)


def _requests_runner(instance: RequestInstance | StreamInstance | DeferredInstance, schema: OutputSchema) -> Runner:
    if isinstance(instance, RequestInstance):
        return RequestRunner(schema, instance)
    if isinstance(instance, StreamInstance):
        return StreamRunner(schema, instance)
    return DeferredRunner(schema, instance)


def shaping_of(config: Mapping[str, Any]) -> RaggedLayout | PaddingRules | None:
    """Return the rules of a config for requests of different shapes, or None.

    ``config`` has the form of the ``/config`` endpoint. Raises `ConfigError`.
    """
    return PaddingRules.from_json(config) or RaggedLayout.from_json(config)


def run_batch(runner: Runner, batch: Sequence[Ticket]) -> tuple[Sequence[Returned], BatchTimes]:
    """Run the requests of ``batch`` that are not cancelled. The cancelled ones get `Cancelled`."""
    if not any(ticket.cancelled for ticket in batch):
        return runner.run(batch)
    # Read once: a request that is cancelled while the others run has an answer among theirs.
    runs = [ticket.pinned or not ticket.cancelled for ticket in batch]
    alive = [ticket for ticket, is_alive in zip(batch, runs, strict=True) if is_alive]
    now = monotonic_ns()
    answers, times = runner.run(alive) if alive else ((), BatchTimes(now, now, now, now))
    answered = iter(answers)
    results = [next(answered) if is_alive else cancelled(ticket) for ticket, is_alive in zip(batch, runs, strict=True)]
    return results, times


class ExecutionRecorder:
    """Records the executions of instance ``name``: in its statistics, and for the observers of its model.

    ``statistics`` creates a counter that one thread writes. There are two: one for the thread that runs batches, one
    for late answers on the event loop.
    """

    def __init__(self, name: str, statistics: Callable[[], ExecutionCounter]) -> None:
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
        """Record that ``batch`` has run. ``finished`` are the requests of it that have their last answer.

        `Padding` counts as a row of the execution, but not as a request.
        """
        padding: Sequence[Ticket] = ()
        if isinstance(batch, Batch):
            padding = [ticket for ticket in batch if _is_padding(ticket)]
            answers = [answer for ticket, answer in zip(finished, answers, strict=True) if not _is_padding(ticket)]
            finished = [ticket for ticket in finished if not _is_padding(ticket)]
            batch = [ticket for ticket in batch if not _is_padding(ticket)]
        succeeded, failed, cancelled = _outcome(finished, answers)
        if len(finished) == len(batch) and not padding:
            self._batches.record(succeeded, failed, times)
        else:
            self._batches.record_requests(succeeded, failed, times)
            ran = batch if len(finished) < len(batch) else succeeded
            if ran:
                self._batches.record_execution([*ran, *padding], times)
        self._conclude(self._batches, succeeded, failed, cancelled, times)

    def late(self, ticket: Ticket, answer: Answer, is_execution: bool = False) -> None:
        """Record a last answer that arrived after its execution, or (``is_execution``) that is the whole execution."""
        start, now = ticket.started_ns, monotonic_ns()
        if is_execution and not self.observers and not isinstance(answer, HeadraceError):
            self._late.record_alone(ticket, start, now)
            return
        times = BatchTimes(start, start, now, now)
        succeeded, failed, cancelled = _outcome([ticket], [answer])
        self._late.record_requests(succeeded, failed, times)
        if is_execution and succeeded:
            self._late.record_execution(succeeded, times)
        self._conclude(self._late, succeeded, failed, cancelled, times)

    def _conclude(
        self,
        statistics: ExecutionCounter,
        succeeded: Sequence[Ticket],
        failed: Sequence[Ticket],
        cancelled: Sequence[Ticket],
        times: BatchTimes,
    ) -> None:
        """Count the cancelled requests, and report the batch to the observers: cancelled counts there as failed."""
        if cancelled:
            statistics.record_cancelled(cancelled, times)
            failed = [*failed, *cancelled]
        if self.observers:
            self._report(succeeded, failed, times)

    def _report(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        for observer in dict.fromkeys(self.observers):  # a copy: observers may be added and removed meanwhile
            try:
                observer.batch_finished(succeeded, failed, times)
            except BaseException:  # from a plugin, on the thread that all later batches need
                log.exception("observer %s of instance '%s' failed", type(observer).__name__, self._name)


def _is_padding(ticket: Ticket) -> bool:
    return isinstance(ticket, Padding)


def _outcome(
    tickets: Sequence[Ticket], answers: Sequence[Answer]
) -> tuple[Sequence[Ticket], Sequence[Ticket], Sequence[Ticket]]:
    """Return the requests that succeeded, that failed, and that were cancelled."""
    if not any(isinstance(answer, HeadraceError) for answer in answers):
        return tickets, (), ()
    succeeded: list[Ticket] = []
    failed: list[Ticket] = []
    cancelled: list[Ticket] = []
    for ticket, answer in zip(tickets, answers, strict=True):
        if not isinstance(answer, HeadraceError) or isinstance(answer, Rescheduled):  # each run counts, as in Triton
            succeeded.append(ticket)
        elif ticket.cancelled and answer.code is Code.CANCELLED:
            cancelled.append(ticket)
        else:
            failed.append(ticket)
    return succeeded, failed, cancelled
