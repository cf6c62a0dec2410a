"""The repository agents of one load of a model, in the order of its config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from headrace.agents.base import RepositoryAgent
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.validation import Problem
from headrace.distributions import is_known
from headrace.errors import Code, ConfigError, LoadError, PluginError, plugin_errors, summary
from headrace.storage.local_directory import LocalDirectory
from headrace.storage.local_storage import check_files
from headrace.storage.temporary_directories import remove

log = logging.getLogger(__name__)

T = TypeVar("T")


class AgentClasses(Protocol):
    """A registry of classes. ``get`` raises `LoadError` with the reason."""

    def get(self, name: str) -> type[RepositoryAgent]: ...


def check_agents(name: str, config: ModelConfig, classes: AgentClasses) -> Iterator[Problem]:
    """Yield a problem for each agent in the ``config`` of the model ``name`` that is not installed."""
    for index, agent in enumerate(config.model_repository_agents.agents):
        try:
            classes.get(agent.name)
        except LoadError as error:
            message = f"model '{name}' needs a repository agent that is missing: {error.message}"
            code = Code.UNSUPPORTED if is_known("agent", agent.name) else error.code
            yield Problem(f"model_repository_agents.agents[{index}].name", message, code)


class AgentChain:
    """The agents of one load. `load` gives them the whole model. Methods block, and are called on loading threads.

    ``directory`` is the directory to load from. All versions share it. When the last version has given it back, the
    agents' `unload` is called.
    """

    def __init__(self, name: str, config: ModelConfig, classes: AgentClasses) -> None:
        """Create the agents. Raises `ConfigError` for an agent that is missing, or that refuses its parameters."""
        for problem in check_agents(name, config, classes):
            raise ConfigError(problem.message, problem.code, field=problem.field)
        self._name = name
        self._agents: list[RepositoryAgent] = []
        self._made: list[Path] = []
        self._is_loaded = False
        for each in config.model_repository_agents.agents:
            kind = classes.get(each.name)
            self._agents.append(_call_agent(kind.name, name, partial(kind, name, dict(each.parameters))))

    def load(self, original: LocalDirectory, new_directory: Callable[[], Path]) -> LocalDirectory:
        """Call each agent's `load` with the directory ``original``. Return the directory to load from. Raises
        `HeadraceError`.

        ``original`` is released when the returned directory is, and if this raises.
        """
        path, loaded_by = original.path, list[RepositoryAgent]()

        def make() -> Path:
            self._made.append(new_directory())
            return self._made[-1]

        try:
            for agent in self._agents:
                path = _call_agent(agent.name, self._name, partial(agent.load, path, make))
                loaded_by.append(agent)
                if path != original.path:
                    _check_directory(agent.name, self._name, path)
        except BaseException:
            self._notify(loaded_by[::-1], "load_fail")
            self._remove(original)
            raise
        name = self._name if path in self._made else ""
        return LocalDirectory(path, partial(self._end, original), name=name)

    def ended(self, *, is_loaded: bool) -> None:
        """Report the end of the load to the agents."""
        self._is_loaded = is_loaded
        self._notify(self._agents[::-1], "load_complete" if is_loaded else "load_fail")

    def _end(self, original: LocalDirectory) -> None:
        if self._is_loaded:
            self._notify(self._agents, "unload")
        self._remove(original)
        if self._is_loaded:
            self._notify(self._agents[::-1], "unload_complete")

    def _remove(self, original: LocalDirectory) -> None:
        for path in self._made:
            remove(path)
        original.release()

    def _notify(self, agents: Sequence[RepositoryAgent], event: str) -> None:
        for agent in agents:
            try:
                getattr(agent, event)()
            except Exception:  # code of a plugin; the others are still called
                log.exception("repository agent '%s' of model '%s' failed in %s", agent.name, self._name, event)


def _check_directory(agent: str, model: str, path: Path) -> None:
    """Raise `HeadraceError` unless a model may be loaded from ``path``."""
    if not (isinstance(path, Path) and path.is_dir()):
        raise PluginError(f"repository agent '{agent}' returned {path!r} for model '{model}', which is no directory")
    check_files(path, (), allow_external_links=False)


def _call_agent(agent: str, model: str, act: Callable[[], T]) -> T:
    """Call ``act`` and return its result. Turn an exception into a `HeadraceError`."""
    with plugin_errors(f"repository agent '{agent}' failed for model '{model}'"):
        try:
            return act()
        except OSError as error:
            raise LoadError(f"repository agent '{agent}' cannot load model '{model}': {summary(error)}") from error
