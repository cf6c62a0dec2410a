"""The parts that a model's config names: where they are looked up, and how a backend is made."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.backends.base import AnyInstance, Backend, Model
from headrace.config import parameters
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.options import ServerOptions
from headrace.distributions import is_known
from headrace.errors import Code, ConfigError, InternalError, LoadError, PluginError, summary
from headrace.schedulers.base import Scheduler


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
    return found(backend_settings(name, found, options))


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
        return find_scheduler(config, schedulers).needs_instances
    except ConfigError:
        return parameters.SCHEDULER not in config.parameters


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
