"""From ``config.pbtxt`` to a complete and valid config, in four steps, and the parts that it names.

A file is parsed and derived, `examine` says what is wrong that needs no backend, `fill` asks the
backend for what is still missing, and `judge` holds the result against every rule (docs/spec/behaviours.md
sections 4.3, 4.4). `read` and `complete` take these steps for a load and raise the first problem;
``headrace check`` takes them for the whole list.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from headrace.backends.base import AnyInstance, Backend, Isolation, Model
from headrace.config import padding, parameters, validation
from headrace.config.completed_fields import is_set, names_all_tensors
from headrace.config.config_json import config_to_json
from headrace.config.derive import derive, fill_batching
from headrace.config.model_config_pb2 import ModelConfig, ModelInput, ModelOutput, ModelParameter
from headrace.config.options import ServerOptions
from headrace.config.parse import clip, find_config, read_config
from headrace.config.validation import Problem
from headrace.distributions import installs, is_known
from headrace.errors import Code, ConfigError, HeadraceError, InternalError, LoadError, PluginError, summary
from headrace.executors.devices import available_gpus, fill_groups
from headrace.executors.process.config_completion import complete_apart
from headrace.messages import dtypes
from headrace.schedulers.base import Dependency, OtherModel, Scheduler, full_class

log = logging.getLogger(__name__)

#: How long a version may take to load, where nothing is said, and the setting of a backend that says it.
LOAD_TIMEOUT_S, LOAD_TIMEOUT_OPTION = 600, "load-timeout-seconds"

#: Fields of a config that are for the engine: each backend says on which it acts.
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
    options: ServerOptions,
    schedulers: Parts,
) -> ModelConfig:
    """Return the written ``config`` of the model ``name``, derived in place but not completed. Raises `ConfigError`.

    ``model_path`` has those of its ``files`` that all versions share.
    """
    derive(config, name, files, needs_backend=needs_backend(config, schedulers))
    raise_first(examine(config, name, model_path, options, schedulers))
    return config


def complete(model: Model, backend: Backend, options: ServerOptions) -> None:
    """Complete ``model.config`` in place and validate it. Raises `ConfigError`, `LoadError` or `PluginError`."""
    fill(model, backend, options)
    raise_first(judge(model, backend, options))
    for problem in parameters.unknown(backend.Parameters, model.config.parameters):
        log.warning("model '%s': %s; it is ignored", model.name, problem.message)
    for note in without_effect(model.config, backend):
        log.warning("model '%s': %s", model.name, note.message)
    _say_raw_elements(model.config)
    if model.config.backend:
        fill_groups(model.config, backend, available_gpus())


def parse(model_path: Path, options: ServerOptions) -> ModelConfig:
    """What the config file of the model at ``model_path`` says; raises `ConfigError`.

    No file says nothing, which is an error only if auto-completion is off.
    """
    path = find_config(model_path, options.model_config_name)
    if path is None and options.disable_auto_complete_config:
        raise ConfigError(f"{model_path / 'config.pbtxt'}: no such file, and auto-completion is off")
    return read_config(path) if path is not None else ModelConfig()


def examine(
    config: ModelConfig, name: str, model_path: Path, options: ServerOptions, schedulers: Parts
) -> Iterator[Problem]:
    """What is wrong with a derived config before its versions and its backend are looked for.

    What asks for something that is not there is not completed, and so is judged here to the end.
    """
    yield from validation.early(
        config, complete=options.disable_auto_complete_config, needs_backend=needs_backend(config, schedulers)
    )
    if config.name != name:
        yield Problem(
            "name",
            f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name",
        )
    try:
        find_scheduler(config, schedulers)
    except ConfigError as error:
        yield from written(config, model_path)
        yield Problem(error.field, error.message, error.code)


def written(config: ModelConfig, model_path: Path) -> list[Problem]:
    """Those problems of an incomplete ``config`` that completing it would not cure: they lie in what is written."""
    found = validation.problems(config, gpus=available_gpus(), files=model_path)
    if not found and config.input and config.output and config.max_batch_size:
        found = _padding_problems(config)
    return [problem for problem in found if is_set(config, problem.field)]


def raise_first(problems: Iterable[Problem]) -> None:
    """Raise `ConfigError` for the first of ``problems``, if there is any."""
    for problem in problems:
        raise ConfigError(problem.message, problem.code, field=problem.field)


def fill(model: Model, backend: Backend, options: ServerOptions) -> None:
    """Let ``backend`` complete ``model.config`` in place, unless that is turned off.

    A model whose parameter ``isolation`` says so has that done in a process, too, for as long as it takes.
    The backend is given the typed parameters. Where those of the config are wrong, which `judge` says, they are
    those of a config without any. Raises what the backend raises; `PluginError` if that is no error of ours.
    """
    if options.disable_auto_complete_config:
        return
    config, scheduling = model.config, model.config.WhichOneof("scheduling_choice")
    try:
        if _is_apart(backend, config):
            memory_bytes = parameters.read_memory_limit(config.parameters)
            timeout_s = load_timeout_s(backend, config)
            complete_apart(backend, model, Isolation(memory_bytes=memory_bytes, load_timeout_s=timeout_s))
        else:
            backend.complete_config(replace(model, parameters=_typed(backend.Parameters, config.parameters)))
    except HeadraceError:
        raise
    except BaseException as error:  # SystemExit of a stranger is its error, too
        raise PluginError(
            f"backend '{backend.name}' failed to complete the config of '{model.name}': {summary(error)}"
        ) from error
    if scheduling is not None and config.WhichOneof("scheduling_choice") != scheduling:
        raise ConfigError(
            f"backend '{backend.name}' changed the scheduling choice of model '{model.name}' from {scheduling} to "
            f"{config.WhichOneof('scheduling_choice')}"
        )
    fill_batching(config)


def load_timeout_s(backend: Backend, config: ModelConfig) -> int:
    """Return how long a version may take to load: what the model's parameter says, else the option of ``backend``.

    Raises `ConfigError`.
    """
    text = backend.options.get(LOAD_TIMEOUT_OPTION, str(LOAD_TIMEOUT_S))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ConfigError(
            f"backend option {LOAD_TIMEOUT_OPTION} of '{backend.name}' is '{clip(text)}', expected a number of "
            "seconds above 0"
        )
    return parameters.read_load_timeout(config.parameters) or int(text)


def has_processes(backend: Backend, config: ModelConfig) -> bool:
    """True if the instances of a model have processes, or if that is for ``backend`` to say. Raises `ConfigError`."""
    asked = parameters.read_isolation(config.parameters)
    return asked == "process" or (asked is None and type(backend).isolation is not Backend.isolation)


def _is_apart(backend: Backend, config: ModelConfig) -> bool:
    """Whether the engine may only look at the model's file in another process. A backend that has a say in how its
    models are isolated sees to that itself."""
    if names_all_tensors(config) or type(backend).isolation is not Backend.isolation:
        return False
    try:
        return parameters.read_isolation(config.parameters) == "process"
    except ConfigError:  # which is told when the config is judged
        return False


def without_effect(config: ModelConfig, backend: Backend) -> list[Problem]:
    """What ``config`` says to engines on which ``backend`` does not act, if that says on what it does."""
    if backend.engine_fields is None:
        return []
    return [
        Problem(field, f"{field} has no effect: backend '{backend.name}' does not act on it")
        for field in _ENGINE_FIELDS
        if field not in backend.engine_fields and is_set(config, field)
    ]


def _say_raw_elements(config: ModelConfig) -> None:
    if not dtypes.HAS_BFLOAT16 and any(each.data_type == dtypes.BF16.config_value for each in _tensors(config)):
        what = f"model '{config.name}' has BF16 tensors, whose elements are two raw bytes each to code in this process"
        log.warning("%s; numbers come with: %s", what, installs("ml_dtypes"))


def _tensors(config: ModelConfig) -> Iterator[ModelInput | ModelOutput]:
    yield from config.input
    yield from config.output


def _typed(cls: type, given: Mapping[str, ModelParameter]) -> Any:
    try:
        return parameters.parse_parameters(cls, given)
    except ConfigError:
        return parameters.parse_parameters(cls, {})


def judge(model: Model, backend: Backend, options: ServerOptions) -> list[Problem]:
    """Every problem of the completed ``model.config``, in Triton's order, then those of its parameters."""
    kind, given = backend.Parameters, model.config.parameters
    gpus, files = available_gpus(), model.path.parent
    wrong = validation.problems(model.config, gpus=gpus, files=files, needs_backend=bool(backend.name))
    wrong += parameters.check(kind, given)
    if not wrong:
        wrong += _padding_problems(model.config)
    runtime = model.config.runtime
    if runtime.endswith(".py") and not backend.has_runtimes:
        message = f"unable to find backend library '{runtime}' for model '{model.name}': backend '{backend.name}' is"
        wrong.append(Problem("runtime", f"{message} no file"))
    return wrong + (parameters.unknown(kind, given) if options.strict_parameters else [])


def _padding_problems(config: ModelConfig) -> list[Problem]:
    """Of the parameter `padding`, which is read beside inputs and outputs that are in order."""
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
    """Where classes are looked up: a registry. ``get`` raises `LoadError` with the reason."""

    def get(self, name: str) -> Any: ...


class PluginRegistries(Protocol):
    """What the plugins have brought."""

    @property
    def backends(self) -> Parts: ...

    @property
    def schedulers(self) -> Parts: ...

    @property
    def agents(self) -> Parts: ...

    @property
    def hook(self) -> Any:
        """The hooks; a raise of one plugin is the caller's."""

    def tell(self, hook: str, **given: Any) -> None:
        """Call ``hook`` of every plugin; what one raises is logged."""


class NoBackend(Backend):
    """Stands for the backend of a model that has none, because it has no instances: its scheduler answers."""

    name = ""

    def load(self, model: Model) -> AnyInstance:
        raise InternalError(f"model '{model.name}' has no instances")


def make_backend(name: str, backends: Parts, hook: Any, options: ServerOptions) -> Backend:
    """The backend ``name``, `NoBackend` for none. Raises as `find_backend`, and what its class raises."""
    if not name:
        return NoBackend({})
    found = find_backend(name, backends, hook, options)
    settings = backend_settings(name, found, options)
    batch_size = settings.get("default-max-batch-size")  # in Triton's words, for each model
    if batch_size is None:
        log.debug("Adding default backend config setting: default-max-batch-size,4")
    else:
        log.debug("Found overwritten default setting: default-max-batch-size,%s", batch_size)
    return found(settings)


def find_backend(name: str, backends: Parts, hook: Any, options: ServerOptions) -> type[Backend]:
    """The class of the backend ``name``: one of ``backends``, or one that a plugin finds.

    Raises `LoadError` with the reason if there is none.
    """
    try:
        found: type[Backend] = backends.get(name)
    except LoadError:
        asked = _ask(name, hook, options)
        if asked is None:
            raise
        found = asked
    return found


def find_scheduler(config: ModelConfig, schedulers: Parts) -> type[Scheduler]:
    """The class of the scheduler of a model: the one that its parameter ``scheduler`` names, else that of its
    ``scheduling_choice``, else ``direct``. Raises `ConfigError` with the reason if there is none."""
    if parameters.SCHEDULER in config.parameters:
        name, field = config.parameters[parameters.SCHEDULER].string_value, f"parameters['{parameters.SCHEDULER}']"
    else:
        name = field = config.WhichOneof("scheduling_choice") or "direct"
    try:
        found: type[Scheduler] = schedulers.get(name)
    except LoadError as error:
        code = Code.UNSUPPORTED if is_known("scheduler", name) else error.code
        raise ConfigError(error.message, code, field=field) from error
    return found


def needs_backend(config: ModelConfig, schedulers: Parts) -> bool:
    """Whether a model must have a backend, since its scheduler needs instances to run on.

    A scheduler that its parameter names and that is not there counts as one that does without: what is missing is the
    scheduler.
    """
    try:
        return full_class(find_scheduler(config, schedulers)).needs_instances
    except ConfigError:
        return parameters.SCHEDULER not in config.parameters


def dependencies(config: ModelConfig, scheduler: type[Scheduler]) -> frozenset[Dependency]:
    """The models that ``scheduler`` needs for one of ``config``. What it raises becomes an error of ours."""
    with _of_scheduler(scheduler, config):
        return frozenset(full_class(scheduler).depends_on(config))


def complete_with(config: ModelConfig, scheduler: type[Scheduler], others: Mapping[Dependency, OtherModel]) -> None:
    """Have ``scheduler`` hold ``config`` against the ``others``, and complete it in place. Raises as `dependencies`,
    and `LoadError` if the result cannot be cached."""
    with _of_scheduler(scheduler, config):
        full_class(scheduler).complete_config(config, others)
    for problem in validation.check_caching(config):  # the scheduler may have found the model to be decoupled
        raise LoadError(problem.message, problem.code)


@contextmanager
def _of_scheduler(scheduler: type[Scheduler], config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except HeadraceError:
        raise
    except BaseException as error:  # a stranger's code
        raise PluginError(
            f"scheduler '{scheduler.name}' failed to complete the config of '{config.name}': {summary(error)}"
        ) from error


def scheduler_parameters(config: ModelConfig, scheduler: type[Scheduler]) -> Any:
    """What the parameters ``scheduler.NAME`` of ``config`` say to ``scheduler``. Raises `ConfigError`, also for one
    that it does not know."""
    prefix = parameters.SCHEDULER_PREFIX
    given = {key.removeprefix(prefix): value for key, value in config.parameters.items() if key.startswith(prefix)}
    for problem in parameters.unknown(scheduler.Parameters, given):
        raise ConfigError(f"scheduler '{scheduler.name}': {problem.message}", field="parameters")
    try:
        return parameters.parse_parameters(scheduler.Parameters, given)
    except ConfigError as error:
        raise ConfigError(f"scheduler '{scheduler.name}': {error.message}", field="parameters") from error


def _ask(name: str, hook: Any, options: ServerOptions) -> Any:
    try:
        return hook.find_backend(name=name, options=options)
    except BaseException as error:  # a stranger's code
        raise PluginError(f"a plugin failed to find backend '{name}': {summary(error)}") from error


def backend_settings(name: str, backend: type[Backend], options: ServerOptions) -> dict[str, str]:
    """What ``--backend-config`` says to ``backend`` under ``name``: the global settings and its own.

    With ``--dev``, those that it has for development stand where it says nothing.
    """
    default = backend.dev_options if options.dev else {}
    return {**default, **options.backend_config.get("", {}), **options.backend_config.get(name, {})}
