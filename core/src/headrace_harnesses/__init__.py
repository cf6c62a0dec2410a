"""Run an instance or a scheduler without a server. The conformance kits use these harnesses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from headrace.backends.base import AnyInstance
from headrace.config.model_config_pb2 import ModelConfig
from headrace.executors.instance import runner_for
from headrace.executors.instance_thread import InstanceThread
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import Runner
from headrace.executors.warmup import complete
from headrace.messages.response import Answer
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace.models.configuring import scheduler_parameters
from headrace.models.signature import Signature
from headrace.schedulers.base import (
    Clock,
    Dependency,
    InstanceInfo,
    OtherModel,
    ScheduledModel,
    Scheduler,
    full_scheduler_class,
)
from headrace.schedulers.rescheduling_queue import model_queue_class
from headrace.telemetry.statistics import ModelStatistics


class InstanceHarness:
    """Runs requests on one loaded ``instance`` of a model with the complete ``config``, as a server does."""

    def __init__(self, instance: AnyInstance, config: ModelConfig) -> None:
        signature = Signature(config.name, config)
        schema = OutputSchema(config.name, "1", signature.outputs, signature.batched)
        #: Validates a request against the config and sets its ``rows``. Raises the error that a client gets.
        self.check: Callable[[Ticket], None] = signature.check
        self._runner = runner_for(instance, schema)

    def run(self, tickets: Sequence[Ticket]) -> Sequence[Answer]:
        """Run one batch on the calling thread. Return the last answer to each request when all have ended."""
        return complete(self._runner, tickets)


class SchedulerHarness:
    """Runs a scheduler of class ``kind`` for a model without a repository. Event loop only.

    ``model_queue`` is the server's own class. ``model_queue.submit(ticket)`` submits a request. Each of
    ``model_queue.sources`` is one of the ``instances``: ``poll(wakeup)`` returns its next batch, or an empty list and
    later calls ``wakeup.wake()``. ``deliver(tickets, answers)`` takes the answers of a batch. ``call`` receives the
    requests to other models. Raises `ConfigError` for unknown parameters of the scheduler.
    """

    def __init__(
        self,
        kind: type[Scheduler],
        config: ModelConfig,
        instances: Sequence[InstanceInfo],
        inputs: Mapping[str, Spec],
        outputs: Mapping[str, Spec],
        clock: Clock,
        call: Callable[[Ticket], None],
        others: Mapping[Dependency, OtherModel],
    ) -> None:
        parameters = scheduler_parameters(config, kind)
        full_scheduler_class(kind).complete_config(config, others)
        model = ScheduledModel(config, instances, inputs, outputs, call, parameters, others=others)
        self.statistics, self._outputs, self._loop = ModelStatistics(), outputs, asyncio.get_running_loop()
        self._threads: list[InstanceThread] = []
        self.model_queue = model_queue_class(kind, config)(kind, model, self.statistics, self._loop, clock)

    async def start_threads(self, make: Callable[[], AnyInstance]) -> None:
        """Start a thread for each of ``instances``. It runs the instance that ``make`` returns."""
        outputs = {**self._outputs, **self.model_queue.full_scheduler.kept}
        schema = OutputSchema("", "1", outputs, True)

        def load() -> tuple[AnyInstance, Runner]:
            instance = make()
            return instance, runner_for(instance, schema)

        for source in self.model_queue.sources:
            thread = InstanceThread(source.instance.name, load, self.statistics.for_instance)
            self._threads.append(thread)
            await asyncio.to_thread(thread.load)
            thread.serve(source, self._loop)

    async def join_threads(self) -> None:
        """Wait until the threads have ended. Call ``model_queue.close()`` first."""
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
