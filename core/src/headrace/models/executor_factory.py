"""Creates the executors of a version: a thread of the server, or a process, per instance."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from headrace.backends.base import AnyInstance, Backend, Isolation, Model
from headrace.config.config_json import config_to_json
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.parameters import (
    EVENT_LOOP,
    ISOLATION,
    MEMORY_LIMIT,
    read_busy_poll,
    read_event_loop,
    read_isolation,
    read_load_timeout,
    read_memory_limit,
)
from headrace.errors import ConfigError
from headrace.executors.devices import Placement
from headrace.executors.executor import Executor
from headrace.executors.gpu_memory import refuse_beyond
from headrace.executors.instance import close_instance, failures_worded, load_instance, runner_for, shaping_of
from headrace.executors.instance_thread import InstanceThread, may_run_on_loop
from headrace.executors.loop_policy import LoopPolicy
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import Runner
from headrace.executors.threads import side_by_side
from headrace.executors.warmup import WarmupSample, prepare, read_samples
from headrace.messages.spec import Spec
from headrace.models.configuring import load_timeout_s
from headrace.models.local_services import LocalServices, SiblingServices
from headrace.models.signature import Signature
from headrace.telemetry.executions import ExecutionCounter
from headrace.telemetry.log_output import speak_for
from headrace.telemetry.statistics import ModelStatistics
from headrace_processes.handshake import InstanceSpec
from headrace_processes.process_executor import ExecutorResources, ProcessExecutor

log = logging.getLogger(__name__)


def isolation_of(backend: Backend, model: Model) -> Isolation | None:
    """Return how the instances of ``model`` get processes of their own; None for threads of the server.

    Raises `ConfigError` for an invalid parameter, or for a memory limit without a process. Raises `LoadError` if the
    backend does.
    """
    parameters = model.config.parameters
    asked = read_isolation(parameters)
    chosen = None if asked == "thread" else backend.isolation(model)
    if chosen is None and asked == "process":
        chosen = Isolation(load_timeout_s=load_timeout_s(backend, model.config))
    memory_bytes = read_memory_limit(parameters)
    busy_poll_us = read_busy_poll(parameters, 0 if chosen is None else chosen.busy_poll_us)
    if chosen is not None:
        if read_event_loop(parameters) == "on":
            raise ConfigError(
                f"parameter '{EVENT_LOOP}' is 'on', but the instances of the model run in processes of their own",
                field=f"parameters['{EVENT_LOOP}']",
            )
        timeout_s = read_load_timeout(parameters) or chosen.load_timeout_s
        return replace(chosen, memory_bytes=memory_bytes, busy_poll_us=busy_poll_us, load_timeout_s=timeout_s)
    if memory_bytes:  # a limit without a process has no effect; a missing busy poll does no harm
        raise ConfigError(
            f"parameter '{MEMORY_LIMIT}' needs instances in processes of their own: set parameter '{ISOLATION}' to "
            "'process'"
        )
    return None


class ExecutorFactory:
    """Creates and loads the executors of one version. Runs on a loading thread.

    ``isolation`` says how they get processes of their own; None for threads of the server. ``kept`` are outputs that
    the scheduler keeps from callers. ``services`` are the server's services for the instances.
    """

    def __init__(
        self,
        backend: Backend,
        model: Model,
        signature: Signature,
        isolation: Isolation | None,
        kept: Mapping[str, Spec],
        statistics: ModelStatistics,
        services: SiblingServices,
        shared: ExecutorResources,
    ) -> None:
        self._backend, self._model, self._statistics = backend, model, statistics
        self._isolation, self._kept, self._services, self._shared = isolation, kept, services, shared
        #: What each executor that has not closed owns.
        self._owned: dict[Executor, tuple[LocalServices, list[ExecutionCounter]]] = {}
        self._siblings: list[ProcessExecutor] = []
        self._on_loop = read_event_loop(model.config.parameters)
        self._schema = OutputSchema(
            model.name,
            str(model.version),
            {**signature.outputs, **kept},
            signature.batched,
            backend.outputs_as_given,
        )
        self._samples: list[WarmupSample] = read_samples(model.config, model.path.parent)
        prepare(self._samples, signature.inputs, signature.check)

    def load(self, placements: Sequence[Placement], config: ModelConfig) -> list[Executor]:
        """Return a loaded executor for each of ``placements``, with ``config`` as its model's config. They load in
        parallel.

        If one fails, close all and raise the first error.
        """
        if not placements:
            return []
        refuse_beyond(self._shared.gpu_limits, placements)
        executors = [self._executor(placement, replace(self._model, config=config)) for placement in placements]
        try:
            side_by_side([executor.load for executor in executors], "headrace-load")
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
        if executor in self._siblings:
            self._siblings.remove(executor)
        services, numbers = self._owned.pop(executor)
        self._services.release(services)
        self._statistics.keep(numbers)

    def _executor(self, placement: Placement, model: Model) -> Executor:
        services, numbers = self._services.of_instance(), list[ExecutionCounter]()

        def statistics() -> ExecutionCounter:
            numbers.append(self._statistics.for_instance())
            return numbers[-1]

        if self._isolation is None:
            own = replace(model, instance_name=placement.name, device=placement.device, services=services)
            executor: Executor = InstanceThread(placement.name, partial(self._load, own), statistics, self._where())
        else:
            executor = self._process(
                self._spec(placement, model, self._isolation), self._isolation, services, statistics
            )
        self._owned[executor] = services, numbers
        return executor

    def _where(self) -> bool | LoopPolicy:
        """Return True if the event loop runs the instance, False for its thread, or the policy that decides."""
        return LoopPolicy(self._shared.loop_time) if self._on_loop == "auto" else self._on_loop == "on"

    def _process(
        self,
        spec: InstanceSpec,
        isolation: Isolation,
        services: LocalServices,
        statistics: Callable[[], ExecutionCounter],
    ) -> ProcessExecutor:
        return ProcessExecutor(
            spec, isolation, services, self._schema, self._samples, statistics, self._siblings, self._shared
        )

    def _spec(self, placement: Placement, model: Model, isolation: Isolation) -> InstanceSpec:
        backend = type(self._backend)
        return InstanceSpec(
            isolation.entry,
            f"{backend.__module__}:{backend.__qualname__}",
            dict(self._backend.options),
            model.name,
            model.version,
            str(model.path),
            json.dumps(config_to_json(model.config)),
            {key: value.string_value for key, value in model.config.parameters.items()},
            placement.name,
            placement.device.kind,
            placement.device.id,
            backend.outputs_as_given,
            [spec.to_json() for spec in self._kept.values()],
            model.is_sent,
        )

    def _load(self, model: Model) -> tuple[AnyInstance, Runner]:
        """Return one instance, warmed up, and its runner. Runs on the instance's thread."""
        speak_for(model.name)
        log.debug("Creating instance %s on %s", model.instance_name, model.device.kind)
        with failures_worded(self._backend, model.name, log):
            instance = load_instance(self._backend, model)
            try:
                self._require_any_thread(instance)
                runner = runner_for(instance, self._schema, shaping_of(config_to_json(model.config)))
                for sample in self._samples:
                    sample.run(runner, model.instance_name)
            except BaseException:
                close_instance(instance, model.instance_name)
                raise
        return instance, runner

    def _require_any_thread(self, instance: AnyInstance) -> None:
        """Raise `ConfigError` if the config asks for the event loop and the instance does not allow it."""
        if self._on_loop == "on" and not may_run_on_loop(instance):
            raise ConfigError(
                f"model '{self._model.name}': parameter '{EVENT_LOOP}' is 'on', but an instance of backend "
                f"'{self._backend.name}' runs on a thread of its own only",
                field=f"parameters['{EVENT_LOOP}']",
            )
