"""Choose where the instances of a model run: the kind of executor, by the parameter ``isolation`` or the backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.backends.base import Backend, Isolation, Model
from headrace.config.parameters import (
    EVENT_LOOP,
    ISOLATION,
    MEMORY_LIMIT,
    PROCESS,
    THREAD,
    read_busy_poll,
    read_event_loop,
    read_isolation,
    read_load_timeout,
    read_memory_limit,
    read_restart_pause,
)
from headrace.errors import ConfigError
from headrace.executors.kind import ExecutorKind
from headrace.models.configuring import Parts, find_executor, load_timeout_s


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    """The kind of executor of a model, and its backend's settings for processes: None in the server's process."""

    kind: type[ExecutorKind]
    isolation: Isolation | None


def choose_executor(backend: Backend, model: Model, executors: Parts) -> ExecutorChoice:
    """Return where the instances of ``model`` run.

    Raises `ConfigError` for a kind that is not installed, for an invalid parameter, and for one that the kind does not
    support. Raises `LoadError` if the backend does.
    """
    parameters = model.config.parameters
    kind_name = read_isolation(parameters)
    isolation = None
    if kind_name is None or not find_executor(kind_name, model.config, executors).runs_in_server:
        isolation = backend.isolation(model)
    kind = find_executor(kind_name or (THREAD if isolation is None else PROCESS), model.config, executors)
    memory_bytes = read_memory_limit(parameters)
    if kind.runs_in_server:
        read_busy_poll(parameters, 0)  # they have no effect here, and do no harm
        read_restart_pause(parameters, 1)
        if memory_bytes:
            raise ConfigError(
                f"parameter '{MEMORY_LIMIT}' needs instances in processes of their own: set parameter '{ISOLATION}' to "
                f"'{PROCESS}'"
            )
        return ExecutorChoice(kind, None)
    isolation = isolation or Isolation(load_timeout_s=load_timeout_s(backend, model.config))
    busy_poll_us = read_busy_poll(parameters, isolation.busy_poll_us)
    if read_event_loop(parameters) == "on":
        raise ConfigError(
            f"parameter '{EVENT_LOOP}' is 'on', but the instances of the model run in processes of their own",
            field=f"parameters['{EVENT_LOOP}']",
        )
    timeout_s = read_load_timeout(parameters) or isolation.load_timeout_s
    isolation = replace(isolation, memory_bytes=memory_bytes, busy_poll_us=busy_poll_us, load_timeout_s=timeout_s)
    return ExecutorChoice(
        kind, replace(isolation, restart_pause_s=read_restart_pause(parameters, isolation.restart_pause_s))
    )
