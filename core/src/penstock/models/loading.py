"""From a directory in the repository to a `ServedModel`. Runs on loading threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any, Protocol

from penstock.backends.base import AnyInstance, Backend, Model
from penstock.config.model_config_pb2 import ModelConfig
from penstock.config.options import ServerOptions
from penstock.config.parameters import parse_parameters
from penstock.errors import LoadError, PenstockError
from penstock.models.configuring import backend_settings, complete, read
from penstock.models.labels import read_labels
from penstock.models.repository import Entry, available_versions, select_versions
from penstock.models.served import ServedModel
from penstock.models.signature import Signature
from penstock.models.snapshot import Snapshot, take
from penstock.schedulers.base import Scheduler, SchedulerContext
from penstock.telemetry.statistics import ModelStatistics
from penstock.workers.batch import runner_for
from penstock.workers.contract import Contract
from penstock.workers.devices import plan_instances
from penstock.workers.instance import InstanceThread
from penstock.workers.runner import Runner
from penstock.workers.warmup import Sample, read_samples

log = logging.getLogger(__name__)


class Parts(Protocol):
    """Where classes are looked up: a registry. ``get`` raises `LoadError` with the reason."""

    def get(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be loaded: the config as read and derived, the versions, and the files as they were."""

    name: str
    path: Path
    config: ModelConfig
    versions: tuple[int, ...]
    snapshot: Snapshot


class Loader:
    """Loads versions. ``hook`` is the plugins' hooks; ``loop`` is where the models will answer."""

    def __init__(
        self, options: ServerOptions, backends: Parts, schedulers: Parts, hook: Any, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._options = options
        self._backends = backends
        self._schedulers = schedulers
        self._hook = hook
        self._loop = loop
        self._running: dict[str, Backend] = {}
        self._lock = threading.Lock()

    def plan(self, entry: Entry) -> Plan:
        """Read the config and choose the versions. Raises `ConfigError` or `OperatorError`."""
        if entry.is_duplicate:
            raise LoadError("model appears in two or more repositories")
        snapshot = take(entry.path)  # first, so that what changes from here on counts as a change
        config = read(entry.path, self._options, entry.config)
        versions = select_versions(entry.name, config.version_policy, available_versions(entry.path))
        return Plan(entry.name, entry.path, config, tuple(versions), snapshot)

    def load(self, plan: Plan, version: int) -> ServedModel:
        """One version, warmed up and ready for requests. Raises `PenstockError`."""
        started = monotonic_ns()
        backend = self._backend(plan.config.backend)
        model = Model(
            plan.name, version, plan.path / str(version), ModelConfig.FromString(plan.config.SerializeToString())
        )
        complete(model, backend, self._options)
        model = replace(model, parameters=parse_parameters(backend.Parameters, model.config.parameters))
        served = self._assemble(backend, replace(model, shared=backend.share(model)))
        served.statistics.load_ns = monotonic_ns() - started
        self._announce(served)
        return served

    def unloaded(self, model: ServedModel) -> None:
        """Tell the plugins that ``model`` is gone."""
        try:
            self._hook.model_unloaded(model=model)
        except Exception:
            log.exception("a plugin failed in model_unloaded for '%s'", model.name)

    def _backend(self, name: str) -> Backend:
        with self._lock:
            if name not in self._running:
                self._running[name] = self._backends.get(name)(backend_settings(name, self._options))
            return self._running[name]

    def _assemble(self, backend: Backend, model: Model) -> ServedModel:
        config = model.config
        signature = Signature(model.name, config)
        statistics = ModelStatistics()
        release = partial(backend.unshare, model.shared)
        instances: list[InstanceThread] = []
        try:
            labels = read_labels(config, model.path.parent)
            scheduler = self._scheduler(config, statistics)
            load = _InstanceLoader(backend, model, signature)
            for placement in plan_instances(config):
                ready = partial(load, replace(model, instance_name=placement.name, device=placement.device))
                instances.append(InstanceThread(placement.name, ready, statistics.for_instance))
                instances[-1].load()
            served = ServedModel(model.version, config, signature, scheduler, instances, statistics, labels, release)
            observers = [observer for observer in self._hook.observe_model(model=served) if observer is not None]
            for instance in instances:
                instance.serve(scheduler, self._loop, observers)
        except BaseException:
            for instance in instances:
                instance.join()
            release()
            raise
        return served

    def _scheduler(self, config: ModelConfig, statistics: ModelStatistics) -> Scheduler:
        choice = config.WhichOneof("scheduling_choice") or "direct"
        scheduler: Scheduler = self._schedulers.get(choice)(SchedulerContext(self._loop, config, statistics))
        return scheduler

    def _announce(self, served: ServedModel) -> None:
        try:
            self._hook.model_loaded(model=served)
        except Exception:
            log.exception("a plugin failed in model_loaded for '%s'", served.name)


class _InstanceLoader:
    """Loads and warms up one instance; called on that instance's thread."""

    def __init__(self, backend: Backend, model: Model, signature: Signature) -> None:
        self._backend = backend
        self._contract = Contract(model.name, str(model.version), signature.outputs, signature.batched)
        self._samples: list[Sample] = read_samples(model.config, model.path.parent)

    def __call__(self, model: Model) -> tuple[AnyInstance, Runner]:
        instance = self._load(model)
        try:
            instance.warm_up()
            runner = runner_for(instance, self._contract)
            for sample in self._samples:
                sample.run(runner)
        except BaseException:
            instance.close()
            raise
        return instance, runner

    def _load(self, model: Model) -> AnyInstance:
        try:
            return self._backend.load(model)
        except PenstockError:
            raise
        except Exception as error:
            log.error("backend '%s' failed to load '%s'", self._backend.name, model.name, exc_info=error)
            raise LoadError(
                f"backend '{self._backend.name}' failed to load '{model.name}': {type(error).__name__}: {error}"
            ) from error
