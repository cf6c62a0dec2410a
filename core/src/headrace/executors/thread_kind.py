"""The kind of executor that core has: a thread of the server per instance, or the event loop instead of it."""

from __future__ import annotations

import logging
from functools import partial

from headrace.backends.base import AnyInstance
from headrace.config.config_json import config_to_json
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.padding import PADDING
from headrace.config.parameters import EVENT_LOOP, THREAD, read_event_loop
from headrace.errors import ConfigError
from headrace.executors.instance import backend_errors, close_instance, load_instance, runner_for, shaping_of
from headrace.executors.instance_thread import InstanceThread, may_run_on_loop
from headrace.executors.kind import ExecutorKind, InstancePlan
from headrace.executors.loop_policy import LoopPolicy
from headrace.executors.runner import Runner
from headrace.telemetry.log_output import set_thread_model

log = logging.getLogger(__name__)


class ThreadExecutors(ExecutorKind):
    """Runs an instance on a thread of its own. The parameter ``event_loop`` may move it to the event loop."""

    name = THREAD
    runs_in_server = True

    def create(self, plan: InstancePlan) -> InstanceThread:
        setting = read_event_loop(plan.model.config.parameters)
        on_loop = LoopPolicy(self.resources.loop_time) if setting == "auto" else setting == "on"
        load = partial(_load, plan, on_loop is True)
        return InstanceThread(plan.model.instance_name, load, plan.statistics, on_loop)


def _load(plan: InstancePlan, needs_any_thread: bool) -> tuple[AnyInstance, Runner]:
    """Return the instance, warmed up, and its runner. Runs on the instance's thread.

    Raises `ConfigError` if it ``needs_any_thread`` and runs on its own only.
    """
    version, model = plan.version, plan.model
    set_thread_model(model.name)
    log.debug("Creating instance %s on %s", model.instance_name, model.device.kind)
    with backend_errors(version.backend, model.name, log):
        instance = load_instance(version.backend, model)
        try:
            if needs_any_thread and not may_run_on_loop(instance):
                raise ConfigError(
                    f"model '{model.name}': parameter '{EVENT_LOOP}' is 'on', but an instance of backend "
                    f"'{version.backend.name}' runs on a thread of its own only",
                    field=f"parameters['{EVENT_LOOP}']",
                )
            shaping = shaping_of(config_to_json(model.config)) if _may_shape(model.config) else None
            runner = runner_for(instance, version.schema, shaping)
            for sample in version.samples:
                sample.run(runner, model.instance_name)
        except BaseException:
            close_instance(instance, model.instance_name)
            raise
    return instance, runner


def _may_shape(config: ModelConfig) -> bool:
    """False if `shaping_of` returns None for ``config``, which costs more to find out."""
    if PADDING in config.parameters or config.batch_input or config.batch_output:
        return True
    inputs, outputs = config.input, config.output
    return any(each.allow_ragged_batch or each.is_shape_tensor for each in inputs) or any(
        each.is_shape_tensor for each in outputs
    )
