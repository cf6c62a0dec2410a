"""Finds all problems of a model's config, where a load stops at the first. It starts no instance.

An `Inspector` has the models of repositories. An `InspectedModel` is one of them while its files are on this machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

from headrace.agents.agent_chain import check_agents
from headrace.backends.base import Backend, Model
from headrace.config import parameters, validation
from headrace.config.completed_fields import CompletedField
from headrace.config.derive import derive
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.option_groups import complete_groups
from headrace.config.options import ServerOptions
from headrace.config.parse import find_config
from headrace.config.regular_files import read_regular
from headrace.config.source_map import SourceMap
from headrace.config.validation import Problem
from headrace.errors import ConfigError, HeadraceError
from headrace.executors.devices import available_gpus, fill_groups
from headrace.executors.warmup import read_samples
from headrace.models.configuring import (
    check_executor,
    examine,
    fill,
    find_scheduler,
    judge,
    make_backend,
    needs_backend,
    parse,
    scheduler_parameters,
    scheduler_problems,
    without_effect,
    written,
)
from headrace.models.labels import check_labels
from headrace.models.opened_model import OpenedModel, open_model
from headrace.models.versions import files_of, versions_to_serve
from headrace.plugins import Plugins
from headrace.storage.local_directory import LocalDirectory
from headrace.storage.local_storage import is_model
from headrace.storage.repositories import Entry, Fingerprint, Repositories
from headrace_cli.inspection.config_differences import completed_fields
from headrace_cli.inspection.model_dependencies import ModelDependencies


@dataclass(slots=True)
class Findings:
    """The result of the check of a config. ``notes`` are settings without effect: the model can be served.

    ``completed`` are the fields that the config omits, and ``config`` is the config with the fields that Headrace
    completes. ``failed`` has the versions that the backend refused for another reason than the config.
    """

    config: ModelConfig
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    completed: list[CompletedField] = field(default_factory=list)
    failed: list[tuple[int, HeadraceError]] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.problems or self.failed)


class Inspector:
    """The models of ``options.model_repository``, and the installed plugins. Also a context manager. Methods block."""

    def __init__(self, options: ServerOptions) -> None:
        """Raises `ConfigError` for ``options.plugins`` that are not installed."""
        self._plugins = Plugins.discover(options.plugins)
        with suppress(ConfigError):  # a required option that is missing is a mistake in no config
            groups = complete_groups(self._plugins.options, options.plugin_options)
            options = replace(options, plugin_options=groups)
        self._options = options
        self._repositories = Repositories(options, self._plugins.storages)
        self._entries: dict[str, Entry] = {}

    @staticmethod
    def is_model(path: Path) -> bool:
        """True if the directory ``path`` is that of one model, and not a repository."""
        return is_model(path)

    def models(self) -> Mapping[str, Sequence[str]]:
        """Return the places of each model, by its name. One that has several cannot be loaded.

        Raises `HeadraceError` for a repository that cannot be read.
        """
        self._entries = self._repositories.scan()
        return {name: entry.places for name, entry in self._entries.items()}

    @contextmanager
    def open(self, name: str) -> Iterator[InspectedModel]:
        """Give the model ``name`` of `models`. Raises `HeadraceError` if its files cannot be fetched."""
        entry = self._entries[name]
        fingerprint = entry.fingerprint()
        with entry.fetch(files_of(fingerprint.files)) as directory:
            dependencies = ModelDependencies(self._repositories, self._options, self._plugins.schedulers)
            yield InspectedModel(entry, fingerprint, directory, self._options, self._plugins, dependencies)

    def close(self) -> None:
        self._repositories.close()

    def __enter__(self) -> Inspector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class InspectedModel:
    """A model whose files that all versions share are in ``directory`` until the end of the ``with`` block."""

    def __init__(
        self,
        entry: Entry,
        fingerprint: Fingerprint,
        directory: LocalDirectory,
        options: ServerOptions,
        plugins: Plugins,
        dependencies: ModelDependencies,
    ) -> None:
        self.directory = directory.path
        self._entry, self._fingerprint, self._local = entry, fingerprint, directory
        self._options, self._plugins, self._dependencies = options, plugins, dependencies

    @cached_property
    def config_file(self) -> Path | None:
        """The config file, if there is one. Raises `ConfigError` if ``options.model_config_name`` is no file name."""
        return find_config(self.directory, self._options.model_config_name)

    def shown(self, path: Path) -> str:
        """Return ``path`` for people: the model's name stands for a directory that is private."""
        return self._local.hide(str(path))

    def read(self) -> ModelConfig:
        """Return the config as it is written. Raises `ConfigError` with field, line and column."""
        return parse(self.directory, self._options)

    def place(self, field: str) -> tuple[int, int] | None:
        """Return line and column of ``field``, from 1; None if the config file does not have it."""
        return self._source_map.find(field)

    def check(self, *, has_engines: bool) -> Findings:
        """Derive, complete and check the config. Raises `ConfigError` if it cannot be parsed.

        Without ``has_engines``, neither engine nor repository agent is started: only the fields that are written are
        checked. Otherwise backends complete the config, for each version.
        """
        config = self.read()
        opened = OpenedModel(self._entry, self._local, self._fingerprint.files, config)
        check = _Inspection(opened, self._options, self._plugins, self._dependencies)
        with ExitStack() as stack:
            if config.model_repository_agents.agents and has_engines:
                try:
                    check.opened = stack.enter_context(self._left_by_agents())
                except HeadraceError as error:
                    check.add([_reason(error)])
                    return check.findings
            check.run(has_engines=has_engines)
        return check.findings

    @contextmanager
    def _left_by_agents(self) -> Iterator[OpenedModel]:
        """Yield the model after its repository agents have changed it."""
        opened = open_model(self._entry, self._fingerprint, self._options, self._plugins.agents)
        try:
            yield opened
        finally:
            opened.close(is_loaded=True)

    @cached_property
    def _source_map(self) -> SourceMap:
        text = read_regular(self.config_file).decode("utf-8-sig") if self.config_file is not None else ""
        return SourceMap(text, ModelConfig.DESCRIPTOR)


class _Inspection:
    """Fills `findings` for the config of ``opened``."""

    def __init__(
        self,
        opened: OpenedModel,
        options: ServerOptions,
        plugins: Plugins,
        dependencies: ModelDependencies,
    ) -> None:
        self.opened = opened
        self.findings = Findings(_copy(opened.config))
        self._options = options
        self._plugins = plugins
        self._dependencies = dependencies

    def run(self, *, has_engines: bool) -> None:
        opened = self.opened
        original, name, path = opened.config, opened.entry.name, opened.directory.path
        config = self.findings.config = _copy(original)
        self.add(check_agents(name, config, self._plugins.agents))
        has_instances = needs_backend(config, self._plugins.schedulers)
        try:
            derive(config, name, opened.files, needs_backend=has_instances)
            self.findings.completed += completed_fields(original, config, "Headrace")
            self.add(examine(config, name, path, self._options, self._plugins.schedulers))
            versions = versions_to_serve(name, opened.files, config.version_policy)
            if self.findings.is_clean:
                scheduler_parameters(config, find_scheduler(config, self._plugins.schedulers))
            if config.backend and has_engines:
                self._run_versions(versions, config)
            elif config.backend:
                self._run_written(config)
            elif config.platform == "ensemble" or not has_instances:
                self.add(self._problems(config))
                if self.findings.is_clean:
                    self._dependencies.complete(config)
            else:
                self.add(self._written(config))
        except HeadraceError as error:
            self.add([_reason(error), *self._written(config)])

    def _run_versions(self, versions: Iterable[int], config: ModelConfig) -> None:
        name, backend = self.opened.entry.name, self._backend(config)
        for version in versions:
            with self.opened.fetch(version) as directory:
                self._run_version(Model(name, version, directory.path / str(version), _copy(config)), backend, config)

    def _run_written(self, config: ModelConfig) -> None:
        """Check an incomplete ``config`` without its engine."""
        path, backend = self.opened.directory.path, self._backend(config)
        kind = backend.Parameters
        self._add_to(self.findings.notes, without_effect(config, backend))
        self.add([*self._written(config), *check_labels(config, path)])
        self.add(check_executor(config, self._plugins.executors))
        unknown = parameters.unknown(kind, config.parameters, self._plugins.extensions.keys)
        self.add([*parameters.check(kind, config.parameters), *unknown])
        if self.findings.is_clean:
            try:
                read_samples(config, path)
            except HeadraceError as error:
                self.add([Problem("model_warmup", error.message, error.code)])

    def _backend(self, config: ModelConfig) -> Backend:
        try:
            return make_backend(config.backend, self._plugins.backends, self._plugins.hook, self._options)
        except HeadraceError as error:
            field = "backend" if self.opened.config.backend else "platform"
            raise ConfigError(error.message, error.code, field=field) from error

    def _run_version(self, model: Model, backend: Backend, derived: ModelConfig) -> None:
        wrong = self._check_model(model, backend)
        news = completed_fields(derived, model.config, f"backend {backend.name}")
        self.findings.completed += [completion for completion in news if completion not in self.findings.completed]
        self.add(wrong)
        self._add_to(self.findings.notes, without_effect(derived, backend))

    def _check_model(self, model: Model, backend: Backend) -> list[Problem]:
        path = model.path.parent
        try:
            fill(model, backend, self._options, self._plugins.executors)
            wrong = [*judge(model, backend, self._options, self._plugins), *check_labels(model.config, path)]
            if not wrong:
                fill_groups(model.config, backend, available_gpus())
        except HeadraceError as error:
            if not isinstance(error, ConfigError):
                self.findings.failed.append((model.version, error))
                return self._written(model.config)
            return [_reason(error), *self._written(model.config)]
        return wrong

    def _problems(self, config: ModelConfig) -> list[Problem]:
        """Return the problems of a model without instances."""
        files, scheduled = self.opened.directory.path, scheduler_problems(config, self._plugins.schedulers)
        return validation.problems(config, files=files, needs_backend=False, scheduled=scheduled)

    def _written(self, config: ModelConfig) -> list[Problem]:
        return written(config, self.opened.directory.path, self._plugins.schedulers)

    def add(self, problems: Iterable[Problem]) -> None:
        self._add_to(self.findings.problems, problems)

    def _add_to(self, all_problems: list[Problem], problems: Iterable[Problem]) -> None:
        all_problems += [problem for problem in dict.fromkeys(problems) if problem not in all_problems]


def _reason(error: HeadraceError) -> Problem:
    field = error.field if isinstance(error, ConfigError) else ""
    return Problem(field, error.message.strip(), error.code)


def _copy(config: ModelConfig) -> ModelConfig:
    return ModelConfig.FromString(config.SerializeToString())
