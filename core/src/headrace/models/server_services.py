"""What the server does for its models, where it is in the same process (docs/spec/behaviours.md section 9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from headrace.backends.services import LOG_LEVELS, LogLevel
from headrace.errors import Unavailable
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.models.load_slots import NestedLoads
from headrace.models.model_calls import ModelCalls
from headrace.telemetry.custom import CustomMetrics, Holding
from headrace.telemetry.kinds import MetricKind, MetricOperation
from headrace.workers.loop_mailbox import LoopMailbox
from headrace.workers.process.endpoint import LoopServices
from headrace.workers.worker import Worker

log = logging.getLogger("headrace.python")

T = TypeVar("T")


class ModelControl(Protocol):
    """What is needed of a `headrace.server.Server`. All raise `HeadraceError`."""

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None: ...

    async def unload(self, name: str, unload_dependents: bool = False) -> None: ...


class ServerServices:
    """What all instances of all models share. Made on the event loop's thread."""

    def __init__(
        self, mailbox: LoopMailbox, calls: ModelCalls, control: ModelControl, loads: NestedLoads, metrics: CustomMetrics
    ) -> None:
        self.mailbox, self.calls, self.control, self.loads, self.metrics = mailbox, calls, control, loads, metrics

    def siblings(self, model: str) -> SiblingServices:
        """The services of the instances of one version of ``model``."""
        return SiblingServices(self, model)


class SiblingServices:
    """The services of the instances of one version, by the name of the instance."""

    def __init__(self, server: ServerServices, model: str) -> None:
        self._server, self._model = server, model
        self._made: dict[str, LocalServices] = {}

    def call(self, ticket: Ticket) -> None:
        """Have another model answer ``ticket`` for the scheduler; a refusal is an answer. Event loop only."""
        self._server.calls.submit(ticket, None)

    def of_instance(self, name: str) -> LocalServices:
        """The services of the instance ``name``."""
        services = self._made[name] = LocalServices(self._server, self._model)
        return services

    def bind(self, workers: Iterable[Worker]) -> None:
        """Say which worker each instance has, before any of them serves."""
        for worker in workers:
            self._made[worker.name].worker = worker

    def close(self) -> None:
        """The instances have closed: so give up what they hold."""
        for services in self._made.values():
            services.close()


class LocalServices(LoopServices):
    """The services of one instance. ``worker`` is what waits for its requests; None while it is loaded."""

    def __init__(self, server: ServerServices, model: str) -> None:
        self.worker: Worker | None = None
        self._model = model
        self._calls, self._control, self._loads = server.calls, server.control, server.loads
        self._mailbox, self._loop = server.mailbox, server.mailbox.loop
        self._metrics = Holding(server.metrics)

    # ------------------------------------------------------------------ other models

    def infer(self, ticket: Ticket) -> None:
        if not self._mailbox.send(self._calls.submit, ticket, self.worker):
            ticket.respond(Unavailable("the server has stopped"), True)

    def ask(self, request: InferRequest) -> Answer:
        if asyncio._get_running_loop() is self._loop:  # a finalizer may run anywhere
            return Unavailable("a call of another model would block the event loop that is to answer it")
        return super().ask(request)

    def submit(self, ticket: Ticket) -> None:
        self._calls.submit(ticket, self.worker)

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
        """Await ``work`` on the model ``name``, unless this instance, not loaded yet, would wait for itself."""
        if self.worker is None:
            await self._loads.run(self._model, name, work)
        else:
            await work()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RuntimeError:
            work.close()
            raise Unavailable("the server has stopped") from None

    # ------------------------------------------------------------------ log and metrics

    def log(self, level: LogLevel, message: str, file: str, line: int) -> None:
        number = LOG_LEVELS[level]
        if log.isEnabledFor(number):
            record = log.makeRecord(log.name, number, file, line, message, (), None, extra={"model": self._model})
            log.handle(record)

    def metric_family(self, name: str, description: str, kind: MetricKind) -> int:
        return self._metrics.family(name, description, kind)

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        return self._metrics.metric(family, labels, buckets)

    def update_metric(self, metric: int, operation: MetricOperation, value: float) -> None:
        self._metrics.update(metric, operation, value)

    def metric_value(self, metric: int) -> float:
        return self._metrics.value(metric)

    def release(self, handle: int) -> None:
        self._metrics.release(handle)

    def close(self) -> None:
        """Give up every metric that the instance still holds."""
        self._metrics.close()
