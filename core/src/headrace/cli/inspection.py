"""Checks one model of a repository as a load does: first its config, then, if loading is allowed, a whole load.

The result is a `ModelReport`. `locate` finds the file and line of an error of a load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.agents.agent_chain import check_agents
from headrace.backends.base import Backend, Model
from headrace.cli.ensemble_graphs import StepGraph, step_graph
from headrace.cli.model_dependencies import ModelDependencies
from headrace.cli.resource_scopes import ResourceScopes
from headrace.config import parameters, validation
from headrace.config.completed_fields import CompletedField, completed_fields
from headrace.config.derive import derive
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.options import ServerOptions
from headrace.config.parse import find_config
from headrace.config.regular_files import read_regular
from headrace.config.source_map import SourceMap
from headrace.errors import Code, ConfigError, HeadraceError
from headrace.executors.devices import available_gpus, fill_groups
from headrace.executors.warmup import read_samples
from headrace.models.configuring import (
    examine,
    fill,
    find_scheduler,
    judge,
    make_backend,
    needs_backend,
    parse,
    scheduler_parameters,
    without_effect,
    written,
)
from headrace.models.labels import check_labels
from headrace.models.opened_model import OpenedModel, open_model
from headrace.models.versions import files_of, versions_to_serve
from headrace.plugins import Plugins
from headrace.storage.repositories import Entry, Fingerprint, Repositories


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A problem and its place.

    ``line`` and ``column`` count from 1; they are 0 if the place is not known, or not in the file.
    ``field`` is a path in the config, empty if the problem is not in a field. ``code`` is the printed name of an error
    code.
    """

    file: str
    line: int
    column: int
    field: str
    message: str
    code: str

    def __str__(self) -> str:
        place = "".join(f":{number}" for number in (self.line, self.column) if number)
        field = f"{self.field}: " if self.field and not self.message.startswith(self.field) else ""
        return f"{self.file}{place}: {field}{self.message}"


@dataclass(frozen=True, slots=True)
class LoadRefusal:
    """Why a version did not load; version 0 means all versions. ``code`` is the printed name of an error code."""

    version: int
    code: str
    message: str


@dataclass(slots=True)
class ModelReport:
    """The problems of a model, and the config fields that were completed.

    ``notes`` are config settings without effect; the model can be served.
    ``path`` is the config file, or the model's directory if there is none. An ensemble has a ``graph``.
    """

    model: str
    path: str
    problems: list[Diagnostic] = field(default_factory=list)
    notes: list[Diagnostic] = field(default_factory=list)
    completed: list[CompletedField] = field(default_factory=list)
    graph: StepGraph | None = None


def locate(message: str, model_path: Path, version: int, filename: str) -> tuple[Path, int]:
    """Return the file of the model that the error ``message`` is about, and the line in it; 0 if it names none.

    A Python error names both. All other errors are attributed to ``filename`` in the directory of the version.
    """
    folder = model_path / str(version)
    for name, line in (_of_frame(message), _of_syntax(message)):
        for place in (model_path / name, folder / name) if name else ():
            if place.is_file():
                return place, line
    return (folder / filename if filename and (folder / filename).exists() else folder), 0


def _of_syntax(message: str) -> tuple[str, int]:
    """Return file and line of a message like ``SyntaxError: invalid syntax (model.py, line 3)``."""
    _, _, inside = message.splitlines()[0].rpartition("(") if message else ("", "", "")
    name, _, line = inside.removesuffix(")").partition(", line ")
    return _known(name, line)


def _of_frame(message: str) -> tuple[str, int]:
    """Return file and line of the innermost frame: the first line after ``At:``, ``  1/model.py(3): initialize``."""
    _, _, frames = message.partition("\nAt:\n")
    name, _, rest = frames.strip().partition("(")
    return _known(name, rest.partition(")")[0])


def _known(name: str, line: str) -> tuple[str, int]:
    is_place = name and "\0" not in name and line.isascii() and line.isdigit() and len(line) < 9
    return (name, int(line)) if is_place else ("", 0)


def inspect(
    entry: Entry,
    repositories: Repositories,
    options: ServerOptions,
    plugins: Plugins,
    load: Callable[[str], list[LoadRefusal]] | None,
    scopes: ResourceScopes,
) -> ModelReport:
    """Parse, derive, complete and check the config of ``entry`` as a load does, but report all problems.

    If there is none, ``load`` loads the model. If ``load`` is None, no engine is started: the config is not completed,
    and only the fields that it has are checked. ``scopes`` has the rate limiter resources of all models.

    Raises `ConfigError` for a ``--model-config-name`` that is no file name.
    """
    found = ModelReport(entry.name, entry.places[0])
    if entry.is_duplicate:
        message = f"model appears in two or more repositories: {', '.join(entry.places)}"
        found.problems.append(Diagnostic(found.path, 0, 0, "", message, Code.INTERNAL.value))
        return found
    try:
        fingerprint = entry.fingerprint()
        directory = entry.fetch(files_of(fingerprint.files))
    except HeadraceError as error:
        found.problems.append(Diagnostic(found.path, 0, 0, "", error.message, error.code.value))
        return found
    with directory:
        path = find_config(directory.path, options.model_config_name)
        found.path = directory.hide(str(path or directory.path))
        try:
            given = parse(directory.path, options)
        except ConfigError as error:
            found.problems.append(_misread(found.path, error))
            return found
        text = read_regular(path).decode("utf-8-sig") if path is not None else ""
        source_map = SourceMap(text, ModelConfig.DESCRIPTOR)
        dependencies = ModelDependencies(repositories, options, plugins.schedulers)
        opened = OpenedModel(entry, directory, fingerprint.files, given)
        inspection = _Inspection(opened, options, plugins, dependencies, found, source_map)
        with ExitStack() as stack:
            if given.model_repository_agents.agents and load is not None:
                try:
                    inspection.opened = stack.enter_context(_left_by_agents(entry, fingerprint, options, plugins))
                except HeadraceError as error:
                    inspection.add([_reason(error)])
            if not found.problems:
                inspection.run(has_engines=load is not None)
        if load is not None and not found.problems:
            inspection.add_refusals(load(entry.name))
        inspection.add(scopes.problems(given))
    found.problems.sort(key=lambda problem: (problem.line, problem.column))
    return found


@contextmanager
def _left_by_agents(
    entry: Entry, fingerprint: Fingerprint, options: ServerOptions, plugins: Plugins
) -> Iterator[OpenedModel]:
    """Give the model as its repository agents leave it."""
    opened = open_model(entry, fingerprint, options, plugins.agents)
    try:
        yield opened
    finally:
        opened.close(is_loaded=True)


def _misread(path: str, error: ConfigError) -> Diagnostic:
    """Return the diagnostic of a config that cannot be parsed: the message begins with the place and the field."""
    place = f"{path}:{error.line}:{error.column}: " if error.line else f"{path}: "
    message = error.message.removeprefix(place).removeprefix(f"{error.field}: ")
    return Diagnostic(path, error.line, error.column, error.field, message, error.code.value)


class _Inspection:
    """Adds to ``found`` the problems of a config that can be parsed, with their places from ``source_map``."""

    def __init__(
        self,
        opened: OpenedModel,
        options: ServerOptions,
        plugins: Plugins,
        dependencies: ModelDependencies,
        found: ModelReport,
        source_map: SourceMap,
    ) -> None:
        self.opened = opened
        self._options = options
        self._plugins = plugins
        self._dependencies = dependencies
        self._found = found
        self._source_map = source_map
        self._filename = ""

    def add_refusals(self, refusals: Iterable[LoadRefusal]) -> None:
        """Add the errors of a load."""
        for refusal in refusals:
            self._add_refusal(refusal)

    def run(self, *, has_engines: bool) -> None:
        opened = self.opened
        given, name, path = opened.config, opened.entry.name, opened.directory.path
        config = _copy(given)
        self.add(check_agents(name, config, self._plugins.agents))
        has_instances = needs_backend(config, self._plugins.schedulers)
        try:
            derive(config, name, opened.files, needs_backend=has_instances)
            if config.HasField("ensemble_scheduling"):
                self._found.graph = step_graph(config)
            self._found.completed += completed_fields(given, config, "Headrace")
            self.add(examine(config, name, path, self._options, self._plugins.schedulers))
            versions = versions_to_serve(name, opened.files, config.version_policy)
            self._filename = config.default_model_filename
            if not self._found.problems:
                scheduler_parameters(config, find_scheduler(config, self._plugins.schedulers))
            if config.backend and has_engines:
                self._run_versions(versions, config)
            elif config.backend:
                self._run_written(config)
            elif config.platform == "ensemble" or not has_instances:
                self.add(self._problems(config))
                if not self._found.problems:
                    self._dependencies.complete(config)
            else:
                self.add(written(config, path))
        except HeadraceError as error:
            self.add([_reason(error), *written(config, path)])

    def _run_versions(self, versions: Iterable[int], config: ModelConfig) -> None:
        name, backend = self.opened.entry.name, self._backend(config)
        for version in versions:
            with self.opened.fetch(version) as directory:
                self._run_version(Model(name, version, directory.path / str(version), _copy(config)), backend, config)

    def _run_written(self, config: ModelConfig) -> None:
        """Check an incomplete ``config`` without its engine."""
        path, backend = self.opened.directory.path, self._backend(config)
        kind = backend.Parameters
        self._add_to(self._found.notes, without_effect(config, backend))
        self.add([*written(config, path), *check_labels(config, path)])
        self.add([*parameters.check(kind, config.parameters), *parameters.unknown(kind, config.parameters)])
        if not self._found.problems:
            try:
                read_samples(config, path)
            except HeadraceError as error:
                self.add([validation.Problem("model_warmup", error.message, error.code)])

    def _backend(self, config: ModelConfig) -> Backend:
        try:
            return make_backend(config.backend, self._plugins.backends, self._plugins.hook, self._options)
        except HeadraceError as error:
            field = "backend" if self._source_map.holds("backend") else "platform"
            raise ConfigError(error.message, error.code, field=field) from error

    def _run_version(self, model: Model, backend: Backend, derived: ModelConfig) -> None:
        wrong = self._judge(model, backend)
        news = completed_fields(derived, model.config, f"backend {backend.name}")
        self._found.completed += [completion for completion in news if completion not in self._found.completed]
        self.add(wrong)
        self._add_to(self._found.notes, without_effect(derived, backend))

    def _judge(self, model: Model, backend: Backend) -> list[validation.Problem]:
        path = model.path.parent
        try:
            fill(model, backend, self._options)
            wrong = [*judge(model, backend, self._options), *check_labels(model.config, path)]
            if not wrong:
                fill_groups(model.config, backend, available_gpus())
        except HeadraceError as error:
            if not isinstance(error, ConfigError):
                self._add_refusal(LoadRefusal(model.version, error.code.value, error.message))
                return written(model.config, path)
            return [_reason(error), *written(model.config, path)]
        return wrong

    def _problems(self, config: ModelConfig) -> list[validation.Problem]:
        """Return the problems of a model without instances."""
        return validation.problems(config, files=self.opened.directory.path, needs_backend=False)

    def add(self, problems: Iterable[validation.Problem]) -> None:
        self._add_to(self._found.problems, problems)

    def _add_to(self, found: list[Diagnostic], problems: Iterable[validation.Problem]) -> None:
        for problem in problems:
            line, column = self._find(problem.field)
            placed = Diagnostic(self._found.path, line, column, problem.field, problem.message, problem.code.value)
            if placed not in found:
                found.append(placed)

    def _add_refusal(self, refusal: LoadRefusal) -> None:
        """Add an error of a load: to the config if they do not match, else to the model's file."""
        field = "model_warmup" if "warmup" in refusal.message else ""
        if field or not refusal.version or refusal.code in (Code.INVALID_ARGUMENT.value, Code.UNSUPPORTED.value):
            self.add([validation.Problem(field, refusal.message.strip(), Code(refusal.code))])
            return
        directory = self.opened.directory
        file, line = locate(refusal.message, directory.path, refusal.version, self._filename)
        problem = Diagnostic(directory.hide(str(file)), line, 0, "", refusal.message.strip(), refusal.code)
        if problem not in self._found.problems:
            self._found.problems.append(problem)

    def _find(self, field: str) -> tuple[int, int]:
        """Return line and column of ``field``; (0, 0) if it was completed or there is none."""
        filled = any(field.startswith(completion.field) for completion in self._found.completed)
        return (0, 0) if filled else self._source_map.find(field) or (0, 0)


def _reason(error: HeadraceError) -> validation.Problem:
    field = error.field if isinstance(error, ConfigError) else ""
    return validation.Problem(field, error.message.strip(), error.code)


def _copy(config: ModelConfig) -> ModelConfig:
    return ModelConfig.FromString(config.SerializeToString())
