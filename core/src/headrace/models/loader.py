"""From a model of a repository to a `ServedModel`. Runs on loading threads."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import monotonic_ns

from google.protobuf import text_format

from headrace.backends.base import Backend, Model
from headrace.caches.model_cache import ModelCache, ServerCache
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.options import ServerOptions
from headrace.config.parameters import parse_parameters
from headrace.config.secret_settings import shown
from headrace.errors import HeadraceError, LoadError
from headrace.executors.devices import Placement, available_gpus, fill_groups, plan_instances
from headrace.executors.instance import backend_errors, share
from headrace.executors.kind import ExecutorKind, ExecutorResources, VersionPlan
from headrace.executors.output_schema import OutputSchema
from headrace.executors.warmup import prepare, read_samples
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace.models.cache_identity import identity_of
from headrace.models.configuring import (
    PluginRegistries,
    complete,
    complete_with,
    dependencies,
    find_scheduler,
    has_processes,
    judge,
    load_timeout_s,
    make_backend,
    raise_first,
    read,
    scheduler_parameters,
    written,
)
from headrace.models.executor_choice import ExecutorChoice, choose_executor
from headrace.models.executor_factory import ExecutorFactory
from headrace.models.instance_set import InstanceSet
from headrace.models.labels import read_labels
from headrace.models.local_services import SiblingServices
from headrace.models.opened_model import OpenedModel, open_model, placed
from headrace.models.served import PreparedChange, ServedModel
from headrace.models.signature import Signature
from headrace.models.states import ShutdownDeadline
from headrace.models.versions import (
    NoVersion,
    VersionFingerprint,
    fingerprint_of_version,
    versions_to_serve,
)
from headrace.schedulers.base import DelayedStart, Dependency, OtherModel, ScheduledModel
from headrace.schedulers.caching_queue import CachingModelQueue
from headrace.schedulers.instance_info import instance_info
from headrace.schedulers.model_queue import ModelQueue
from headrace.schedulers.rate_limiter import RateLimiter
from headrace.schedulers.rescheduling_queue import model_queue_class
from headrace.storage.local_directory import LocalDirectory
from headrace.storage.repositories import Entry, Fingerprint
from headrace.telemetry.first_responses import FirstResponseTimes, bounds_of
from headrace.telemetry.log_output import set_thread_model
from headrace.telemetry.response_statistics import ResponseStatistics
from headrace.telemetry.statistics import ModelStatistics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A planned load: the config as read and derived, the versions, and the files at that time.

    ``versions`` maps each version to its fingerprint. ``dependencies`` are loaded before. ``opened`` is closed at the
    end of the load.
    """

    opened: OpenedModel
    config: ModelConfig
    versions: Mapping[int, VersionFingerprint]
    fingerprint: Fingerprint
    dependencies: frozenset[Dependency] = frozenset()
    #: The time limit per version on a thread of the server, in s. None if processes load it, which have limits of their
    #: own.
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        return self.opened.entry.name


class Loader:
    """Loads versions. The models answer on ``loop``.

    ``services`` creates the services for the instances of one version. ``cache`` stores the responses of the models
    whose configs enable it.
    """

    def __init__(
        self,
        options: ServerOptions,
        plugins: PluginRegistries,
        loop: asyncio.AbstractEventLoop,
        services: Callable[[str], SiblingServices],
        cache: ServerCache | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        self._options = options
        self._cache = cache
        self._plugins = plugins
        self._loop = loop
        self._services = services
        self.deadline = ShutdownDeadline(options.exit_timeout_secs)
        self._limiter = limiter
        self._running: dict[str, Backend] = {}
        self._kinds: dict[type[ExecutorKind], ExecutorKind] = {}
        self._lock = threading.Lock()
        self._resources = ExecutorResources(loop, self.deadline)

    def plan(self, entry: Entry, loaded: Fingerprint | None = None) -> LoadPlan | None:
        """Read the config and choose the versions. Return None if the fingerprint is still ``loaded``.

        Raises `ConfigError` or `OperatorError`.
        """
        set_thread_model(entry.name)
        if entry.is_duplicate:
            raise LoadError("model appears in two or more repositories")
        fingerprint = entry.fingerprint()  # first, so that later changes count as changes
        if fingerprint == loaded:
            return None
        opened = open_model(entry, fingerprint, self._options, self._plugins.agents)
        try:
            return self._plan(opened, fingerprint)
        except BaseException:
            opened.close(is_loaded=False)
            raise

    def reopen(self, plan: LoadPlan) -> LoadPlan:
        """Return ``plan`` with its files opened again, after it was closed."""
        opened = open_model(plan.opened.entry, plan.fingerprint, self._options, self._plugins.agents)
        return replace(plan, opened=opened)

    def _plan(self, opened: OpenedModel, fingerprint: Fingerprint) -> LoadPlan:
        name, files, path = opened.entry.name, opened.files, opened.directory.path
        with placed(opened.directory, self._options, is_sent=opened.entry.is_sent):
            config = read(name, opened.config, path, files, self._options, self._plugins.schedulers)
            try:
                versions = versions_to_serve(name, files, config.version_policy)
            except NoVersion:  # a mistake in the config is the better error
                raise_first(written(config, path, self._plugins.schedulers))
                raise
        place, files, is_whole = fingerprint.place, fingerprint.files, opened.is_replaced
        fingerprints = {v: fingerprint_of_version(place, files, v, config, is_whole=is_whole) for v in versions}
        needed = dependencies(config, find_scheduler(config, self._plugins.schedulers))
        return LoadPlan(opened, config, fingerprints, fingerprint, needed, self._timeout_s(config))

    def load(
        self, plan: LoadPlan, version: int, directory: LocalDirectory, needed: Mapping[Dependency, ServedModel]
    ) -> ServedModel:
        """Return one version, warmed up and ready for requests. It releases ``directory`` when it is closed. ``needed``
        are its dependencies, kept for it. Raises `HeadraceError`; the directory is then released.
        """
        try:
            with placed(directory, self._options, is_sent=plan.opened.entry.is_sent):
                return self._load(plan, version, directory, needed)
        except BaseException:
            directory.release()
            raise

    def _load(
        self, plan: LoadPlan, version: int, directory: LocalDirectory, needed: Mapping[Dependency, ServedModel]
    ) -> ServedModel:
        set_thread_model(plan.name)
        started = monotonic_ns()
        backend = self._backend(plan.config.backend)
        config = ModelConfig.FromString(plan.config.SerializeToString())
        model = Model(plan.name, version, directory.path / str(version), config, is_sent=plan.opened.entry.is_sent)
        complete(model, backend, self._options, self._plugins)
        services = self._services(model.name)
        others = {key: _other(each, services.asking(each)) for key, each in needed.items()}
        scheduler = find_scheduler(model.config, self._plugins.schedulers)
        if self._options.workers > 1 and scheduler.is_stateful:
            raise LoadError(
                f"model '{model.name}' cannot be served with --workers={self._options.workers}: its scheduler "
                f"'{scheduler.name}' keeps state from one request to the next, which may reach another executor. Serve "
                "it without --workers"
            )
        complete_with(model.config, scheduler, others)
        _log_completed(model.config)
        model = replace(model, parameters=parse_parameters(backend.Parameters, model.config.parameters))
        served = self._assemble(backend, model, services, needed, others, directory.release)
        served.statistics.load_ns = monotonic_ns() - started
        self._plugins.notify("model_loaded", model=served)
        return served

    def change(self, plan: LoadPlan, served: ServedModel) -> PreparedChange:
        """Load the instances by which ``plan`` differs from ``served``. Raises `HeadraceError`; nothing has changed
        then."""
        set_thread_model(plan.name)
        config = ModelConfig.FromString(served.config.SerializeToString())
        config.ClearField("instance_group")
        config.instance_group.extend(plan.config.instance_group)
        backend = self._backend(config.backend)
        changed = replace(served.model, config=config)
        raise_first(judge(changed, backend, self._options, self._plugins))
        fill_groups(config, backend, available_gpus())
        _log_completed(config)
        return served.instances.prepare(config)

    def stop_loading(self, name: str) -> None:
        """Make a load of ``name`` that waits for processes fail soon. Event loop only."""
        for kind in tuple(self._kinds.values()):
            kind.stop_loading(name)

    def abandon(self) -> None:
        """End all instances outside of this process at once. Event loop only."""
        for kind in tuple(self._kinds.values()):
            kind.abandon()

    def unloaded(self, model: ServedModel) -> None:
        """Call the plugins' ``model_unloaded`` hooks."""
        self._plugins.notify("model_unloaded", model=model)

    def _timeout_s(self, config: ModelConfig) -> float | None:
        try:
            backend = self._backend(config.backend)
        except HeadraceError:  # reported by the load of the version
            return None
        timeout_s = load_timeout_s(backend, config)
        return None if has_processes(backend, config, self._plugins.executors) else timeout_s

    def _backend(self, name: str) -> Backend:
        with self._lock:
            if name not in self._running:
                self._running[name] = make_backend(name, self._plugins.backends, self._plugins.hook, self._options)
            return self._running[name]

    def _kind(self, kind: type[ExecutorKind]) -> ExecutorKind:
        with self._lock:
            if kind not in self._kinds:
                self._kinds[kind] = kind(self._resources)
            return self._kinds[kind]

    def _assemble(
        self,
        backend: Backend,
        model: Model,
        services: SiblingServices,
        needed: Mapping[Dependency, ServedModel],
        others: Mapping[Dependency, OtherModel],
        release: Callable[[], None],
    ) -> ServedModel:
        config = model.config
        with backend_errors(backend, model.name, log):
            choice = choose_executor(backend, model, self._plugins.executors)
        with ExitStack() as undo:
            undo.callback(release)
            if choice.kind.runs_in_server:  # the process of an instance shares nothing with others
                model = replace(model, shared=share(backend, model, undo, log))
            signature = Signature(model.name, config)
            statistics = ModelStatistics(responses=ResponseStatistics(FirstResponseTimes(bounds_of(config))))
            undo.callback(services.close)
            placements = plan_instances(config)
            demands = [placement.demand for placement in placements]
            if self._limiter is not None:
                self._limiter.add(demands)
                undo.callback(self._limiter.remove, demands)
            model_queue = self._model_queue(model, signature, placements, statistics, services, others)
            labels = {**model_queue.full_scheduler.labels, **read_labels(config, model.path.parent)}
            plan = _plan_version(backend, model, signature, choice, model_queue.full_scheduler.kept)
            kind, limits = self._kind(choice.kind), self._options.model_load_gpu_limit
            factory = ExecutorFactory(kind, plan, model, statistics, services, limits)
            instances = InstanceSet(model_queue, factory, self._limiter, demands, self._loop)
            instances.begin(placements, factory.load(placements, config))
            release = undo.pop_all().close
            undo.callback(release)
            undo.callback(instances.join)
            served = ServedModel(
                model, signature, model_queue, instances, statistics, labels, release, tuple(needed.values())
            )
            observers = self._plugins.hook.observe_model(model=served, options=self._options)
            instances.serve([observer for observer in observers if observer is not None])
            undo.pop_all()
        return served

    def _model_queue(
        self,
        model: Model,
        signature: Signature,
        placements: Sequence[Placement],
        statistics: ModelStatistics,
        services: SiblingServices,
        others: Mapping[Dependency, OtherModel],
    ) -> ModelQueue:
        config = model.config
        scheduler = find_scheduler(config, self._plugins.schedulers)
        if scheduler.name == "dynamic_batching":  # there is no such thread, but scripts search the log for the line
            log.debug("Starting dynamic-batcher thread for %s at nice 0...", config.name)
        instances = [instance_info(placement, config) for placement in placements]
        parameters = scheduler_parameters(config, scheduler)
        delay = DelayedStart.from_environ(os.environ)
        if delay.requests or delay.backlog:
            text = "model '%s' runs nothing until %d requests wait, and %d in a backlog: set by the environment"
            log.warning(text, config.name, delay.requests, delay.backlog, extra={"model": config.name})
        inputs, outputs, version = signature.inputs, signature.outputs, str(model.version)
        scheduled = ScheduledModel(
            config,
            instances,
            inputs,
            outputs,
            services.call,
            parameters,
            delay,
            others=others,
            version=version,
            directory=model.path.parent,
        )
        if self._cache is None or not config.response_cache.enable:
            kind = model_queue_class(scheduler, config)
            return kind(scheduler, scheduled, statistics, self._loop, limiter=self._limiter)
        identity = identity_of(model, is_shared=self._cache.cache.is_remote)
        cache = ModelCache(self._cache, model.name, str(model.version), identity, signature)
        return CachingModelQueue(scheduler, scheduled, statistics, self._loop, cache, limiter=self._limiter)


def _plan_version(
    backend: Backend, model: Model, signature: Signature, choice: ExecutorChoice, kept: Mapping[str, Spec]
) -> VersionPlan:
    """Return what the instances of a version share. ``kept`` are outputs that the scheduler keeps from callers."""
    outputs = {**signature.outputs, **kept}
    schema = OutputSchema(model.name, str(model.version), outputs, signature.batched, backend.outputs_as_given)
    samples = read_samples(model.config, model.path.parent)
    prepare(samples, signature.inputs, signature.check)
    return VersionPlan(backend, schema, samples, choice.isolation, kept)


def _other(served: ServedModel, ask: Callable[[Ticket], None]) -> OtherModel:
    """Return ``served`` for the scheduler of a model that depends on it."""
    description = served.config, served.version, served.inputs, served.outputs, served.labels, ask
    return OtherModel(*description, served.takes_device_tensors)


def _log_completed(config: ModelConfig) -> None:
    if log.isEnabledFor(logging.DEBUG):
        shown_config = ModelConfig.FromString(config.SerializeToString())
        for name, value in shown_config.parameters.items():
            value.string_value = shown(name, value.string_value)
        text = text_format.MessageToString(shown_config)
        log.debug("Server side auto-completed config: ", extra={"table": text, "model": config.name})
