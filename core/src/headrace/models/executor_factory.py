"""Creates the executors of a version, one per instance, by the kind that was chosen for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.backends.base import Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace.executors.devices import Placement
from headrace.executors.executor import Executor
from headrace.executors.gpu_memory import refuse_beyond
from headrace.executors.kind import ExecutorKind, InstancePlan, VersionPlan
from headrace.executors.threads import run_in_parallel
from headrace.models.local_services import LocalServices, SiblingServices
from headrace.telemetry.executions import ExecutionCounter
from headrace.telemetry.statistics import ModelStatistics


class ExecutorFactory:
    """Creates and loads the executors of one version. Runs on a loading thread.

    ``services`` are the server's services for the instances. ``gpu_limits`` maps a GPU to the used share of its memory
    above which nothing more is loaded there.
    """

    def __init__(
        self,
        kind: ExecutorKind,
        plan: VersionPlan,
        model: Model,
        statistics: ModelStatistics,
        services: SiblingServices,
        gpu_limits: Mapping[int, float],
    ) -> None:
        self._kind, self._plan, self._model = kind, plan, model
        self._statistics, self._services, self._gpu_limits = statistics, services, gpu_limits
        #: The resources of each executor that has not closed.
        self._owned: dict[Executor, tuple[LocalServices, list[ExecutionCounter]]] = {}

    def load(self, placements: Sequence[Placement], config: ModelConfig) -> list[Executor]:
        """Return a loaded executor for each of ``placements``, with ``config`` as its model's config. They load in
        parallel.

        If one fails, close all and raise the first error.
        """
        refuse_beyond(self._gpu_limits, placements)
        executors = [self._executor(placement, replace(self._model, config=config)) for placement in placements]
        try:
            run_in_parallel([executor.load for executor in executors], "headrace-load")
        except BaseException:
            for executor in executors:
                executor.join()
                self.forget(executor)
            raise
        for executor in executors:
            self._owned[executor][0].executor = executor
        return executors

    def forget(self, executor: Executor) -> None:
        """Release what ``executor``, which has closed, owned."""
        self._plan.executors.remove(executor)
        services, numbers = self._owned.pop(executor)
        self._services.release(services)
        self._statistics.keep(numbers)

    def _executor(self, placement: Placement, model: Model) -> Executor:
        services, numbers = self._services.of_instance(), list[ExecutionCounter]()

        def statistics() -> ExecutionCounter:
            numbers.append(self._statistics.for_instance())
            return numbers[-1]

        own = replace(model, instance_name=placement.name, device=placement.device, services=services)
        executor = self._kind.create(InstancePlan(self._plan, own, services, statistics))
        self._plan.executors.append(executor)
        self._owned[executor] = services, numbers
        return executor
