"""Kinds of executor: where the instances of a model run.

A kind is a part of a plugin. The parameter ``isolation`` of a model chooses one by its name, when the model is loaded.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.backends.base import Backend, Isolation, Model
from headrace.backends.services import LoopServices
from headrace.executors.executor import Executor
from headrace.executors.loop_policy import LoopTime
from headrace.executors.output_schema import OutputSchema
from headrace.executors.warmup import WarmupSample
from headrace.messages.spec import Spec
from headrace.telemetry.executions import ExecutionCounter


@dataclass(frozen=True, slots=True, eq=False)
class ExecutorResources:
    """The objects that the executors of all models of one server share. Create it on the event loop's thread.

    ``exit_timeout_s`` returns how many seconds an instance may take to close.
    """

    loop: asyncio.AbstractEventLoop
    exit_timeout_s: Callable[[], float]
    #: The time that the event loop spends on instances that it runs itself.
    loop_time: LoopTime = field(default_factory=LoopTime)


@dataclass(frozen=True, slots=True, eq=False)
class VersionPlan:
    """The common data of all instances of one version.

    - ``schema``: the outputs that the instances must write. ``samples``: the warm-up.
    - ``isolation``: the settings of its processes, by the backend or the config; None for an executor in the server.
    - ``kept``: outputs that the scheduler keeps from callers.
    - ``executors``: the executors of the version that load or have not closed.
    """

    backend: Backend
    schema: OutputSchema
    samples: Sequence[WarmupSample]
    isolation: Isolation | None
    kept: Mapping[str, Spec]
    executors: list[Executor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class InstancePlan:
    """One instance that is to be created: its ``model`` has the name, the device and the services of the instance.

    ``services`` are these services, for calls on the event loop. ``statistics`` creates a counter that one thread
    writes.
    """

    version: VersionPlan
    model: Model
    services: LoopServices
    statistics: Callable[[], ExecutionCounter]


class ExecutorKind(ABC):
    """Creates executors. There is one object per server, created when the first model needs it."""

    #: The value of the parameter ``isolation``.
    name: ClassVar[str]
    #: True if the instances run in the server's process: then they share what `Backend.share` returns.
    runs_in_server: ClassVar[bool] = False

    def __init__(self, resources: ExecutorResources) -> None:
        self.resources = resources

    @abstractmethod
    def create(self, plan: InstancePlan) -> Executor:
        """Return the executor of one instance, which is not loaded yet. Called on loading threads."""

    @classmethod
    def complete_config(cls, backend: Backend, model: Model, isolation: Isolation) -> None:
        """Complete ``model.config`` in place by ``backend``, outside of the server's process. Blocks.

        Not called if `runs_in_server`. Raises `HeadraceError`.
        """
        raise NotImplementedError(f"executor '{cls.name}' runs outside of the server and completes no config")

    def stop_loading(self, model: str) -> None:
        """Make the loads of ``model`` that wait for an instance fail soon. Event loop only."""

    def abandon(self) -> None:
        """End all instances at once. Event loop only."""
