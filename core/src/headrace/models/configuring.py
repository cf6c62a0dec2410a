"""From ``config.pbtxt`` to a complete and valid config, and the parts that it names.

There are four steps:

- `parse` and derive the file.
- `examine` it for problems that need no backend.
- `fill` it: the backend completes what is missing.
- `judge` the result against every rule (docs/spec/behaviours.md sections 4.3, 4.4).

A load takes them by `read` and `complete`, which raise the first problem. ``headrace check`` takes them to list all
problems.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from headrace.backends.base import AnyInstance, Backend, Isolation, Model
from headrace.config import padding, parameters, validation
from headrace.config.completed_fields import is_set, names_all_tensors
from headrace.config.config_json import config_to_json
from headrace.config.derive import derive, fill_batching
from headrace.config.model_config_pb2 import ModelConfig, ModelInput, ModelOutput, ModelParameter
from headrace.config.option_parts import ConfigOptions
from headrace.config.options import ServerOptions
from headrace.config.parse import clip, find_config, read_config
from headrace.config.validation import Problem
from headrace.distributions import installs, is_known
from headrace.errors import Code, ConfigError, HeadraceError, InternalError, LoadError, plugin_errors
from headrace.executors.devices import available_gpus, fill_groups
from headrace.executors.kind import ExecutorKind
from headrace.messages import dtypes
from headrace.schedulers.base import Dependency, OtherModel, Scheduler, full_scheduler_class

log = logging.getLogger(__name__)

#: The default time limit for loading a version, in s, and the backend setting that changes it.
LOAD_TIMEOUT_S, LOAD_TIMEOUT_OPTION = 600, "load-timeout-seconds"

#: Fields of a config for the engine. Each backend declares on which it acts.
_ENGINE_FIELDS = (
    "cc_model_filenames",
    "model_operations",
    "optimization.cuda",
    "optimization.execution_accelerators",
    "optimization.graph",
)


def read(
    name: str,
    config: ModelConfig,
    model_path: Path,
    files: Collection[str],
    options: ConfigOptions,
    schedulers: Parts,
) -> ModelConfig:
    """Return the written ``config`` of the model ``name``, derived in place but not completed. Raises `ConfigError`.

    ``model_path`` has the ``files`` that all versions share.
    """
    derive(config, name, files, needs_backend=needs_backend(config, schedulers))
    raise_first(examine(config, name, model_path, options, schedulers))
    return config


def complete(model: Model, backend: Backend, options: ConfigOptions, plugins: PluginRegistries) -> None:
    """Complete ``model.config`` in place and validate it. Raises `ConfigError`, `LoadError` or `PluginError`."""
    fill(model, backend, options, plugins.executors)
    raise_first(judge(model, backend, options, plugins))
    for problem in parameters.unknown(backend.Parameters, model.config.parameters, plugins.extensions.keys):
        log.warning("model '%s': %s; it is ignored", model.name, problem.message)
    for note in without_effect(model.config, backend):
        log.warning("model '%s': %s", model.name, note.message)
    _warn_of_raw_elements(model.config)
    if model.config.backend:
        fill_groups(model.config, backend, available_gpus())


def parse(model_path: Path, options: ConfigOptions) -> ModelConfig:
    """Return the content of the config file of the model at ``model_path``. Raises `ConfigError`.

    Without a file, return an empty config, or raise if auto-completion is off.
    """
    path = find_config(model_path, options.model_config_name)
    if path is None and options.disable_auto_complete_config:
        raise ConfigError(f"{model_path / 'config.pbtxt'}: no such file, and auto-completion is off")
    return read_config(path) if path is not None else ModelConfig()


def examine(
    config: ModelConfig, name: str, model_path: Path, options: ConfigOptions, schedulers: Parts
) -> Iterator[Problem]:
    """Yield the problems of a derived config that need neither its versions nor its backend.

    A config whose scheduler does not exist is not completed, so all its other written problems are yielded here, too.
    """
    yield from validation.early(
        config,
        complete=options.disable_auto_complete_config,
        needs_backend=needs_backend(config, schedulers),
        scheduled=scheduler_problems(config, schedulers, completed=False),
    )
    if config.name != name:
        yield Problem(
            "name",
            f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name",
        )
    try:
        find_scheduler(config, schedulers)
    except ConfigError as error:
        yield from written(config, model_path, schedulers)
        yield Problem(error.field, error.message, error.code)


def written(config: ModelConfig, model_path: Path, schedulers: Parts) -> list[Problem]:
    """Return the problems of an incomplete ``config`` in set fields, which completing it cannot solve."""
    scheduled = scheduler_problems(config, schedulers)
    problems = validation.problems(config, gpus=available_gpus(), files=model_path, scheduled=scheduled)
    if not problems and config.input and config.output and config.max_batch_size:
        problems = _padding_problems(config)
    return [problem for problem in problems if is_set(config, problem.field)]


def raise_first(problems: Iterable[Problem]) -> None:
    """Raise `ConfigError` for the first of ``problems``, if there is any."""
    for problem in problems:
        raise ConfigError(problem.message, problem.code, field=problem.field)


def fill(model: Model, backend: Backend, options: ConfigOptions, executors: Parts) -> None:
    """Let ``backend`` complete ``model.config`` in place, unless that is turned off.

    If the model's parameter ``isolation`` chooses an executor outside of the server, this runs outside, too. The
    backend gets the typed parameters, or those of a config without any if they are wrong; `judge` reports that. Raises
    what the backend raises; `PluginError` if that is not a `HeadraceError`. Raises `ConfigError` for an executor that
    is not installed.
    """
    if options.disable_auto_complete_config:
        return
    config, scheduling = model.config, model.config.WhichOneof("scheduling_choice")
    with plugin_errors(f"backend '{backend.name}' failed to complete the config of '{model.name}'"):
        if (outside := _executor_outside(backend, config, executors)) is not None:
            memory_bytes = parameters.read_memory_limit(config.parameters)
            timeout_s = load_timeout_s(backend, config)
            isolation = Isolation(memory_bytes=memory_bytes, load_timeout_s=timeout_s)
            outside.complete_config(backend, model, isolation)
        else:
            backend.complete_config(replace(model, parameters=_typed(backend.Parameters, config.parameters)))
    if scheduling is not None and config.WhichOneof("scheduling_choice") != scheduling:
        raise ConfigError(
            f"backend '{backend.name}' changed the scheduling choice of model '{model.name}' from {scheduling} to "
            f"{config.WhichOneof('scheduling_choice')}"
        )
    fill_batching(config)


def load_timeout_s(backend: Backend, config: ModelConfig) -> int:
    """Return the time limit for loading a version, in s: the model's parameter, else the option of ``backend``.

    Raises `ConfigError`.
    """
    text = backend.options.get(LOAD_TIMEOUT_OPTION, str(LOAD_TIMEOUT_S))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ConfigError(
            f"backend option {LOAD_TIMEOUT_OPTION} of '{backend.name}' is '{clip(text)}', expected a number of "
            "seconds above 0"
        )
    return parameters.read_load_timeout(config.parameters) or int(text)


def has_processes(backend: Backend, config: ModelConfig, executors: Parts) -> bool:
    """True if the instances of a model run outside of the server, or if ``backend`` decides that.

    Raises `ConfigError`.
    """
    kind = parameters.read_isolation(config.parameters)
    if kind is None:
        return type(backend).isolation is not Backend.isolation
    return not find_executor(kind, config, executors).runs_in_server


def _executor_outside(backend: Backend, config: ModelConfig, executors: Parts) -> type[ExecutorKind] | None:
    """Return the executor that must complete the config, because the server must not open the model's file.

    None for a backend that decides about isolation itself: it takes care of this. Raises `ConfigError`.
    """
    kind_name = parameters.read_isolation(config.parameters)
    if kind_name is None or names_all_tensors(config) or type(backend).isolation is not Backend.isolation:
        return None
    kind = find_executor(kind_name, config, executors)
    return None if kind.runs_in_server else kind


def without_effect(config: ModelConfig, backend: Backend) -> list[Problem]:
    """Return the engine settings of ``config`` on which ``backend`` does not act, if it declares on which it acts."""
    if backend.engine_fields is None:
        return []
    return [
        Problem(field, f"{field} has no effect: backend '{backend.name}' does not act on it")
        for field in _ENGINE_FIELDS
        if field not in backend.engine_fields and is_set(config, field)
    ]


def _warn_of_raw_elements(config: ModelConfig) -> None:
    if not dtypes.HAS_BFLOAT16 and any(each.data_type == dtypes.BF16.config_value for each in _tensors(config)):
        what = f"model '{config.name}' has BF16 tensors, whose elements are two raw bytes each to code in this process"
        log.warning("%s; numbers come with: %s", what, installs("ml_dtypes"))


def _tensors(config: ModelConfig) -> Iterator[ModelInput | ModelOutput]:
    yield from config.input
    yield from config.output


def _typed(cls: type, texts: Mapping[str, ModelParameter]) -> Any:
    try:
        return parameters.parse_parameters(cls, texts)
    except ConfigError:
        return parameters.parse_parameters(cls, {})


def scheduler_problems(config: ModelConfig, schedulers: Parts, *, completed: bool = True) -> Iterator[Problem]:
    """Yield the problems that the scheduler of ``config`` finds, which `find_scheduler` reports if it is not installed.

    Its exceptions are problems, too. ``completed`` is False if the backend may still complete the config.
    """
    try:
        scheduler = find_scheduler(config, schedulers)
    except ConfigError:
        return
    try:
        with _of_scheduler(scheduler, config):
            problems = list(full_scheduler_class(scheduler).check_config(config, completed=completed))
    except HeadraceError as error:
        problems = [Problem(error.field if isinstance(error, ConfigError) else "", error.message, error.code)]
    yield from problems


def judge(model: Model, backend: Backend, options: ConfigOptions, plugins: PluginRegistries) -> list[Problem]:
    """Return every problem of the completed ``model.config``, in Triton's order, its parameters last."""
    kind, texts = backend.Parameters, model.config.parameters
    gpus, files = available_gpus(), model.path.parent
    scheduled = scheduler_problems(model.config, plugins.schedulers)
    needed = bool(backend.name)
    wrong = validation.problems(model.config, gpus=gpus, files=files, needs_backend=needed, scheduled=scheduled)
    wrong += [*check_executor(model.config, plugins.executors), *parameters.check(kind, texts)]
    if not wrong:
        wrong += _padding_problems(model.config)
    runtime = model.config.runtime
    if runtime.endswith(".py") and not backend.has_runtimes:
        message = f"unable to find backend library '{runtime}' for model '{model.name}': backend '{backend.name}' is"
        wrong.append(Problem("runtime", f"{message} no file"))
    return wrong + (parameters.unknown(kind, texts, plugins.extensions.keys) if options.strict_parameters else [])


def _padding_problems(config: ModelConfig) -> list[Problem]:
    """Return the problems of the parameter `padding`. Call it only if inputs and outputs are valid."""
    if padding.PADDING not in config.parameters:
        return []
    try:
        padding.PaddingRules.from_json(config_to_json(config))
    except ConfigError as error:
        return [Problem(error.field, error.message)]
    return []


# ---------------------------------------------------------------------------
# The parts that a config names
# ---------------------------------------------------------------------------


class Parts(Protocol):
    """A registry of classes. ``get`` raises `LoadError` with the reason."""

    def get(self, name: str) -> Any: ...


class PluginRegistries(Protocol):
    """The parts and hooks of all plugins."""

    @property
    def backends(self) -> Parts: ...

    @property
    def schedulers(self) -> Parts: ...

    @property
    def agents(self) -> Parts: ...

    @property
    def executors(self) -> Parts: ...

    @property
    def extensions(self) -> Any: ...

    @property
    def hook(self) -> Any:
        """The hooks. If a plugin raises, so does the call."""

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call ``hook`` of every plugin. Log what one raises."""


class NoBackend(Backend):
    """The backend of a model without one: it has no instances, and its scheduler answers."""

    name = ""

    def load(self, model: Model) -> AnyInstance:
        raise InternalError(f"model '{model.name}' has no instances")


def make_backend(name: str, backends: Parts, hook: Any, options: ServerOptions) -> Backend:
    """Return the backend ``name``; `NoBackend` if the name is empty. Raises as `find_backend`, and what its class
    raises."""
    if not name:
        return NoBackend({})
    backend_class = find_backend(name, backends, hook, options)
    settings = backend_settings(name, backend_class, options)
    batch_size = settings.get("default-max-batch-size")  # in Triton's words, for each model
    if batch_size is None:
        log.debug("Adding default backend config setting: default-max-batch-size,4")
    else:
        log.debug("Found overwritten default setting: default-max-batch-size,%s", batch_size)
    return backend_class(settings)


def find_backend(name: str, backends: Parts, hook: Any, options: ServerOptions) -> type[Backend]:
    """Return the class of the backend ``name``, from ``backends`` or from a plugin's hook.

    Raises `LoadError` with the reason if there is none.
    """
    try:
        backend_class: type[Backend] = backends.get(name)
    except LoadError:
        offered = _ask(name, hook, options)
        if offered is None:
            raise
        backend_class = offered
    return backend_class


def find_scheduler(config: ModelConfig, schedulers: Parts) -> type[Scheduler]:
    """Return the scheduler class of a model. Raises `ConfigError` with the reason if there is none.

    The name is the model's parameter ``scheduler``, else the field of its ``scheduling_choice``, else ``direct``.
    """
    if parameters.SCHEDULER in config.parameters:
        name, field = config.parameters[parameters.SCHEDULER].string_value, f"parameters['{parameters.SCHEDULER}']"
    else:
        name = field = config.WhichOneof("scheduling_choice") or "direct"
    try:
        scheduler: type[Scheduler] = schedulers.get(name)
    except LoadError as error:
        code = Code.UNSUPPORTED if is_known("scheduler", name) else error.code
        raise ConfigError(error.message, code, field=field) from error
    return scheduler


def find_executor(name: str, config: ModelConfig, executors: Parts) -> type[ExecutorKind]:
    """Return the kind of executor ``name``. Raises `ConfigError`, with the kinds that are installed, if there is
    none."""
    try:
        kind: type[ExecutorKind] = executors.get(name)
    except LoadError as error:
        if parameters.ISOLATION not in config.parameters:
            raise ConfigError(f"model '{config.name}' needs executor '{name}': {error.message}", error.code) from error
        prefix = f"model '{config.name}': parameter '{parameters.ISOLATION}' is '{clip(name)}'"
        field = f"parameters['{parameters.ISOLATION}']"
        raise ConfigError(f"{prefix}: {error.message}", error.code, field=field) from error
    return kind


def check_executor(config: ModelConfig, executors: Parts) -> list[Problem]:
    """Return a problem if the parameter ``isolation`` names an executor that is not installed."""
    kind_name = parameters.read_isolation(config.parameters)
    try:
        if kind_name is not None:
            find_executor(kind_name, config, executors)
    except ConfigError as error:
        return [Problem(error.field, error.message, error.code)]
    return []


def needs_backend(config: ModelConfig, schedulers: Parts) -> bool:
    """True if a model must have a backend, because its scheduler needs instances.

    False if its parameter names an unknown scheduler: the error is then about the scheduler.
    """
    try:
        return full_scheduler_class(find_scheduler(config, schedulers)).needs_instances
    except ConfigError:
        return parameters.SCHEDULER not in config.parameters


def kind_of(config: ModelConfig) -> str:
    """Return the word for a model that depends on others: the scheduler that it names, or ``ensemble``."""
    named = parameters.SCHEDULER in config.parameters
    return config.parameters[parameters.SCHEDULER].string_value if named else "ensemble"


def dependencies(config: ModelConfig, scheduler: type[Scheduler]) -> frozenset[Dependency]:
    """Return the models that ``scheduler`` needs for a model with ``config``. Its exceptions become
    `HeadraceError`s."""
    with _of_scheduler(scheduler, config):
        return frozenset(full_scheduler_class(scheduler).depends_on(config))


def complete_with(config: ModelConfig, scheduler: type[Scheduler], others: Mapping[Dependency, OtherModel]) -> None:
    """Let ``scheduler`` check ``config`` against the ``others`` and complete it in place.

    Raises as `dependencies`, and `LoadError` if responses of the result cannot be cached.
    """
    with _of_scheduler(scheduler, config):
        full_scheduler_class(scheduler).complete_config(config, others)
    for problem in validation.check_caching(config):  # the scheduler may have made the model decoupled
        raise LoadError(problem.message, problem.code)


def _of_scheduler(scheduler: type[Scheduler], config: ModelConfig) -> AbstractContextManager[None]:
    return plugin_errors(f"scheduler '{scheduler.name}' failed on the config of '{config.name}'")


def scheduler_parameters(config: ModelConfig, scheduler: type[Scheduler]) -> Any:
    """Return the parameters ``scheduler.NAME`` of ``config``. Raises `ConfigError`, also for an unknown one."""
    prefix = parameters.SCHEDULER_PREFIX
    values = {key.removeprefix(prefix): value for key, value in config.parameters.items() if key.startswith(prefix)}
    for problem in parameters.unknown(scheduler.Parameters, values):
        raise ConfigError(f"scheduler '{scheduler.name}': {problem.message}", field="parameters")
    try:
        return parameters.parse_parameters(scheduler.Parameters, values)
    except ConfigError as error:
        raise ConfigError(f"scheduler '{scheduler.name}': {error.message}", field="parameters") from error


def _ask(name: str, hook: Any, options: ServerOptions) -> Any:
    with plugin_errors(f"a plugin failed to find backend '{name}'"):
        return hook.find_backend(name=name, options=options)


def backend_settings(name: str, backend: type[Backend], options: ServerOptions) -> dict[str, str]:
    """Return the ``--backend-config`` settings of ``backend``: the global ones and those for ``name``.

    With ``--dev``, its development settings are the defaults. One for GPUs gets ``pinned-memory-pool-byte-size``, too.
    """
    default = dict(backend.dev_options if options.dev else {})
    if "gpu" in backend.devices:
        default["pinned-memory-pool-byte-size"] = str(options.pinned_memory_pool_byte_size)
    return {**default, **options.backend_config.get("", {}), **options.backend_config.get(name, {})}
