"""The kind of executor ``process``: each instance has a process of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast
from weakref import WeakSet

from headrace.backends.base import Backend, Isolation, Model
from headrace.config.config_json import config_to_json
from headrace.config.parameters import PROCESS
from headrace.executors.kind import ExecutorKind, ExecutorResources, InstancePlan

if TYPE_CHECKING:  # imported with the first model that has a process: 25 modules, 3 % of a start
    from headrace_processes.handshake import InstanceSpec
    from headrace_processes.process_executor import ProcessExecutor

#: For backends whose `Isolation` names no entry.
_ENTRY = "headrace_processes.handshake:load"


class ProcessExecutors(ExecutorKind):
    """Creates a `ProcessExecutor` per instance."""

    name = PROCESS

    def __init__(self, resources: ExecutorResources) -> None:
        super().__init__(resources)
        #: The executors of all models, also while they load or close.
        self._open: WeakSet[ProcessExecutor] = WeakSet()

    def create(self, plan: InstancePlan) -> ProcessExecutor:
        from headrace_processes.process_executor import ProcessExecutor

        isolation = plan.version.isolation or Isolation()
        isolation = replace(isolation, entry=isolation.entry or _ENTRY)
        siblings = cast("Sequence[ProcessExecutor]", plan.version.executors)  # a version has executors of one kind
        executor = ProcessExecutor(plan, _spec(plan, isolation.entry), isolation, siblings, self.resources)
        self._open.add(executor)
        return executor

    @classmethod
    def complete_config(cls, backend: Backend, model: Model, isolation: Isolation) -> None:
        from headrace_processes.config_completion import complete_in_process

        complete_in_process(backend, model, isolation)

    def stop_loading(self, model: str) -> None:
        for executor in tuple(self._open):
            if executor.model == model:
                executor.stop_loading()

    def abandon(self) -> None:
        for executor in tuple(self._open):
            executor.abandon()


def _spec(plan: InstancePlan, entry: str) -> InstanceSpec:
    """Return what the child of an instance loads."""
    from headrace_processes.handshake import InstanceSpec

    model, version, backend = plan.model, plan.version, type(plan.version.backend)
    return InstanceSpec(
        entry,
        f"{backend.__module__}:{backend.__qualname__}",
        dict(version.backend.options),
        model.name,
        model.version,
        str(model.path),
        json.dumps(config_to_json(model.config)),
        {key: value.string_value for key, value in model.config.parameters.items()},
        model.instance_name,
        model.device.kind,
        model.device.id,
        backend.outputs_as_given,
        [spec.to_json() for spec in version.kept.values()],
        model.is_sent,
    )
