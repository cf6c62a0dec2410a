"""The server's services for models in the same process: other models, load and unload, log and metrics.

Source: docs/spec/behaviours.md section 9.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any, Protocol, TypeVar

from headrace.backends.services import LOG_LEVELS, LogLevel, LoopServices
from headrace.errors import Cancelled, HeadraceError, InternalError, InvalidArgument, Unavailable, summary
from headrace.executors.executor import Executor
from headrace.executors.threads import LoopMailbox
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.models.deadlocks import DeadlockDetector, no_executors
from headrace.models.interceptors import InterceptorChain
from headrace.models.running_loads import NestedLoads
from headrace.models.served import ServedModel
from headrace.models.serving_table import ServingTable
from headrace.models.submission import RequestSubmitter, check_and_enqueue, model_caller, refuse_decoupled_call
from headrace.models.view import ModelView
from headrace.schedulers.in_flight import write
from headrace.schedulers.rate_limiter import RateLimiter
from headrace.telemetry.custom import CustomMetrics, InstanceMetrics
from headrace.telemetry.log_limits import rate_limited_logger
from headrace.telemetry.series import MetricKind, MetricOperation

log = rate_limited_logger(__name__)
#: The log of models. It is not rate-limited.
models_log = logging.getLogger("headrace.python")

T = TypeVar("T")

#: Triton's text for a queue.
_EXPIRED = "Request timeout expired"

#: At most this many models may wait for one request in a chain, so that an endless recursion ends.
MAX_CALLERS = 128


class ModelControl(Protocol):
    """The part of `headrace.server.Server` that is needed here. All methods raise `HeadraceError`."""

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None: ...

    async def unload(self, name: str, unload_dependents: bool = False) -> None: ...


class ServerServices:
    """The services that all instances of all models share. Create it on the event loop's thread."""

    def __init__(
        self, mailbox: LoopMailbox, calls: ModelCalls, control: ModelControl, loads: NestedLoads, metrics: CustomMetrics
    ) -> None:
        self.mailbox, self.calls, self.control, self.loads, self.metrics = mailbox, calls, control, loads, metrics

    def siblings(self, model: str) -> SiblingServices:
        """Return the services of the instances of one version of ``model``."""
        return SiblingServices(self, model)


class SiblingServices:
    """The services of the instances of one version."""

    def __init__(self, server: ServerServices, model: str) -> None:
        self._server, self._model = server, model
        self._made: dict[LocalServices, None] = {}

    def call(self, ticket: Ticket) -> None:
        """Send ``ticket`` to another model for the scheduler. A refusal is an answer. Event loop only."""
        self._server.calls.submit(ticket, None)

    def asking(self, other: ServedModel) -> Callable[[Ticket], None]:
        """Return a function that sends a request of the scheduler to ``other``. It raises if the request is refused.

        Event loop only.
        """
        return self._server.calls.asking(other)

    def of_instance(self) -> LocalServices:
        """Return the services of one more instance. Set its `LocalServices.executor` before it serves."""
        services = LocalServices(self._server, self._model)
        self._made[services] = None
        return services

    def release(self, services: LocalServices) -> None:
        """Release what an instance that has closed still holds."""
        self._made.pop(services, None)
        services.close()

    def close(self) -> None:
        """Release everything: all instances have closed."""
        for services in tuple(self._made):
            self.release(services)


class LocalServices(LoopServices):
    """The services of one instance. ``executor`` waits for its requests; None while it is loaded."""

    def __init__(self, server: ServerServices, model: str) -> None:
        self.executor: Executor | None = None
        self._model, self.find = model, server.calls.find
        self._calls, self._control, self._loads = server.calls, server.control, server.loads
        self._mailbox, self._loop = server.mailbox, server.mailbox.loop
        self._metrics = InstanceMetrics(server.metrics)

    # ------------------------------------------------------------------ other models

    def infer(self, ticket: Ticket) -> None:
        if not self._mailbox.send(self._calls.submit, ticket, self.executor):
            ticket.respond(Unavailable("the server has stopped"), True)

    def ask(self, request: InferRequest) -> Answer:
        if asyncio._get_running_loop() is self._loop:  # a finalizer may run on any thread
            return Unavailable("a call of another model would block the event loop that answers it")
        return super().ask(request)

    def submit(self, ticket: Ticket) -> None:
        self._calls.submit(ticket, self.executor)

    def cancel(self, ticket: Ticket) -> None:
        self._mailbox.send(ticket.cancel)

    def stop(self, ticket: Ticket) -> None:
        self._mailbox.send(ticket.stop)

    def read(self, ticket: Ticket) -> None:
        self._mailbox.send(ticket.read)

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        parameters = {"config": config, **files} if config else dict(files)
        self._await(self._change(name, partial(self._control.load, name, parameters)))

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self._await(self._change(name, partial(self._control.unload, name, unload_dependents)))

    def is_model_ready(self, name: str, version: str) -> bool:
        return self._await(self._calls.is_ready(name, version))

    async def _change(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Await ``work`` on the model ``name``, unless this instance, which is being loaded, would wait for itself."""
        if self.executor is None:
            await self._loads.run(self._model, name, work)
        else:
            await work()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        if asyncio._get_running_loop() is self._loop:
            work.close()
            raise Unavailable("waiting for a model would block the event loop that loads it")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RuntimeError:
            work.close()
            raise Unavailable("the server has stopped") from None

    # ------------------------------------------------------------------ log and metrics

    def log(self, level: LogLevel, message: str, file: str, line: int) -> None:
        number = LOG_LEVELS[level]
        if models_log.isEnabledFor(number):
            record = models_log.makeRecord(
                models_log.name, number, file, line, message, (), None, extra={"model": self._model}
            )
            models_log.handle(record)

    def metric_family(self, name: str, description: str, kind: MetricKind) -> int:
        return self._metrics.family(name, description, kind)

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        return self._metrics.metric(family, labels, buckets)

    def update_metric(self, metric: int, operation: MetricOperation, value: float, times: int = 1) -> None:
        self._metrics.update(metric, operation, value, times)

    def metric_value(self, metric: int) -> float:
        return self._metrics.value(metric)

    def release(self, handle: int) -> None:
        self._metrics.release(handle)

    def close(self) -> None:
        """Release every metric that the instance still holds."""
        self._metrics.close()


class ModelCalls:
    """Submits the calls of models to models, and breaks deadlocks among them (docs/spec/behaviours.md section 9.5).

    Event loop only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        table: ServingTable,
        admission: InterceptorChain | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        self._loop, self._table = loop, table
        self._single = RequestSubmitter(self.find, refuse_decoupled_call, model_caller, admission)
        self._any_number = RequestSubmitter(self.find, None, model_caller, admission)
        waits_for = no_executors if limiter is None else limiter.blockers_of
        self._deadlocks = DeadlockDetector(loop, self._break_deadlock, waits_for)
        self._refusals: dict[Ticket, HeadraceError] = {}
        #: With a control mode of a plugin: `ControlMode.hold` and `ControlMode.is_ready`, for models not loaded yet.
        self.hold: Callable[[str], Awaitable[Callable[[], None]]] | None = None
        self.is_loadable: Callable[[str], bool] = lambda name: False
        self._waiting: set[asyncio.Task[None]] = set()

    def submit(self, ticket: Ticket, executor: Executor | None) -> None:
        """Submit ``ticket``. A refusal is an answer, in Triton's words.

        ``executor`` waits for it. None: a scheduler waits, or an instance that is being loaded.
        """
        if self.hold is None or self._table.ready_versions(ticket.request.model_name):
            self._submit(ticket, executor)
            return
        task = self._loop.create_task(self._submit_when_loaded(ticket, executor, self.hold))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        ticket.on_cancel = partial(_stop_waiting, task)

    async def _submit_when_loaded(
        self, ticket: Ticket, executor: Executor | None, hold: Callable[[str], Awaitable[Callable[[], None]]]
    ) -> None:
        try:
            release = await hold(ticket.request.model_name)
            ticket.on_cancel = None
            self._submit(ticket, executor)
            release()
        except HeadraceError as error:
            ticket.on_cancel = None
            write(ticket, _refused(ticket.request, error.with_traceback(None)), True)
        except asyncio.CancelledError:
            ticket.on_cancel = None
            write(ticket, Cancelled(f"{ticket.request.log_id}request was cancelled"), True)

    def _submit(self, ticket: Ticket, executor: Executor | None) -> None:
        request = ticket.request
        try:
            if request.caller is not None:
                self._bound(ticket, request.caller, executor)
                request = ticket.request
            submitter = self._any_number if request.decoupled else self._single
            _require_end(request)
            view = submitter.find(request.model_name, request.model_version)
            target = self._table.served_loaded(request.model_name, request.model_version)
            self._start_for(executor, submitter, view, target, ticket)
        except HeadraceError as error:
            write(ticket, _refused(request, error), True)
        except Exception as error:
            log.exception("a request to model '%s' failed", request.model_name)
            write(ticket, _refused(request, InternalError(summary(error))), True)

    def asking(self, other: ServedModel) -> Callable[[Ticket], None]:
        """Return a function that submits a request of a scheduler to ``other``. It raises the error that refuses it."""
        view, submitter = other.view, self._any_number
        is_unseen, check, enqueue = submitter.start is check_and_enqueue, view.check, view.enqueue

        def ask(ticket: Ticket) -> None:
            if len(ticket.request.callers) > 1:  # a chain of models waits for it
                _require_end(ticket.request)
                self._start_for(None, submitter, view, other, ticket)
            elif is_unseen:
                check(ticket)
                enqueue(ticket)
            else:
                submitter.start(view, ticket)

        return ask

    async def is_ready(self, name: str, version: str) -> bool:
        """True if that version (empty: the latest) would take requests; False if there is none.

        Raises `InvalidArgument` for a version that is not a number.
        """
        if self.is_loadable(name) and not self._table.ready_versions(name):
            return True
        return await self._table.is_ready(self._table.served_loaded, name, version)

    def _start_for(
        self,
        executor: Executor | None,
        submitter: RequestSubmitter,
        view: ModelView,
        target: ServedModel,
        ticket: Ticket,
    ) -> None:
        watcher = partial(self._answered, executor)
        ticket.watch(watcher)
        awaiting = () if executor is None else _sent_by(executor, ticket.request.caller)
        self._deadlocks.add(executor, ticket, target, awaiting)  # before it can be answered
        try:
            submitter.start(view, ticket)
        except BaseException:
            self._deadlocks.discard(executor, ticket)
            if ticket.watchers:
                ticket.watchers.remove(watcher)
            raise

    def find(self, name: str, version: str) -> ModelView:
        try:
            return self._table.resolve_loaded(name, version)
        except HeadraceError as error:
            raise type(error)(
                f"Failed for execute the inference request. Model '{name}' is not ready. {error.message}"
            ) from error

    def _answered(self, executor: Executor | None, ticket: Ticket, answer: Answer, final: bool) -> Answer:
        """Return ``answer``. If the request was stopped, return the reason instead of the last answer."""
        if not final:
            return answer
        self._deadlocks.discard(executor, ticket)
        return self._refusals.pop(ticket, answer)

    def _bound(self, ticket: Ticket, caller: InferRequest, executor: Executor | None) -> None:
        """End ``ticket`` at the latest deadline of the requests for which it was sent. ``caller`` is the request for
        which it was sent.

        Raises `Unavailable` if the time is over. A model that executes a batch, or answers later, does not name the
        request for which it calls: the latest deadline counts.
        """
        if not (caller.deadline_ns or caller.timeout_us):
            return
        executing = () if executor is None else executor.executing
        batch = executing if any(executed.request is caller for executed in executing) else ()
        meant = () if executor is None else _sent_by(executor, caller)
        deadlines = [ticket.request.deadline_ns for ticket in meant] if executor is not None else [caller.deadline_ns]
        if deadlines and all(deadlines):
            left_ns = max(deadlines) - monotonic_ns()
            if left_ns <= 0:
                raise Unavailable(_EXPIRED)
            timer = self._loop.call_later(left_ns / 1e9, self._expire, ticket)
            ticket.watch(partial(_cancel_timer, timer))
        if not ticket.request.timeout_us and batch and all(executed.request.timeout_us for executed in batch):
            now = monotonic_ns()
            left_us = [executed.request.timeout_us - (now - executed.arrival_ns) // 1000 for executed in batch]
            ticket.request = ticket.request.with_timeout(max(*left_us, 1))

    def _expire(self, ticket: Ticket) -> None:
        self._refusals[ticket] = _refused(ticket.request, Unavailable(_EXPIRED))
        ticket.stop()  # the sender still waits for an answer

    def _break_deadlock(self, ticket: Ticket, path: Sequence[str]) -> None:
        """Remove ``ticket``, which can never be answered, from its queue."""
        shown = " -> ".join(f"'{name}'" for name in path)
        self._refusals[ticket] = _refused(
            ticket.request,
            Unavailable(
                f"every instance of model '{ticket.request.model_name}' waits, directly or through others, for this "
                f"request: {shown}. More instances would help, or one call less"
            ),
        )
        ticket.cancel()


def _stop_waiting(task: asyncio.Task[None], ticket: Ticket) -> None:
    task.cancel()


def _sent_by(executor: Executor, caller: InferRequest | None) -> Sequence[Ticket]:
    """Return the requests for which ``executor`` sent a call that names ``caller``: the whole batch of that request.

    Without a caller, return all its requests.
    """
    executing = executor.executing
    if caller is None:
        return [*executing, *executor.unanswered]
    for executed in executing:
        if executed.request is caller:
            return executing
    return _executed_with(caller, executor.unanswered)


def _executed_with(caller: InferRequest, tickets: Sequence[Ticket]) -> list[Ticket]:
    """Return the requests of ``tickets`` that were executed in one batch with ``caller``, with it; none if it is
    answered."""
    started_ns = next((ticket.started_ns for ticket in tickets if ticket.request is caller), 0)
    return [ticket for ticket in tickets if ticket.started_ns == started_ns] if started_ns else []


def _require_end(request: InferRequest) -> None:
    if len(request.callers) > MAX_CALLERS:
        raise InvalidArgument(
            f"{len(request.callers)} models wait for this request, one behind the other; the limit is {MAX_CALLERS}"
        )


def _cancel_timer(timer: asyncio.TimerHandle, ticket: Ticket, answer: Answer, final: bool) -> Answer:
    if final:
        timer.cancel()
    return answer


def _refused(request: InferRequest, error: HeadraceError) -> HeadraceError:
    return HeadraceError(f"Model {request.model_name} - Error when running inference: {error.message}", error.code)
