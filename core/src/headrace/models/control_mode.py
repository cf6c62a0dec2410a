"""A control mode of a plugin: it decides which models of the repository are loaded, and when.

::

    class Lazy(ControlMode):
        name = "lazy"        # --model-control-mode=lazy

A control mode is an interceptor, the last one. Its `admit` is called for every operation before the model is searched,
and may wait for a load. It loads and unloads models by a `headrace_loading.LoadControl`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from headrace.config.option_parts import CONTROL_MODES, ControlOptions
from headrace.distributions import missing
from headrace.errors import ConfigError, HeadraceError, Unsupported
from headrace.models.interceptors import Interceptor

if TYPE_CHECKING:
    from headrace.models.lifecycle import Lifecycle
    from headrace.models.loader import Loader
    from headrace.models.running_loads import LoadSlots
    from headrace.storage.repositories import Repositories


class LoadingParts(NamedTuple):
    """The parts of the server by which models are loaded. Plugins pass them to `headrace_loading.LoadControl`."""

    lifecycle: Lifecycle
    loader: Loader
    repositories: Repositories
    slots: LoadSlots


class ControlMode(Interceptor):
    """Decides which models are loaded if ``--model-control-mode`` is its ``name``. One object per server.

    Event loop only. `admit` is called before the model is searched, and may return an awaitable that loads it. A model
    that was admitted must stay until the operation ends (`Watch.ended`).
    """

    last = True
    #: For a `LoadControl`, by which it loads and unloads models. Set before `start`.
    parts: LoadingParts

    @property
    def enabled(self) -> bool:
        return self.options.model_control_mode == self.name

    async def start(self) -> list[HeadraceError]:
        """Load the models that serve from the start. Return the failures."""
        return []

    @abstractmethod
    async def hold(self, name: str) -> Callable[[], None]:
        """Return when ``name`` serves, for a caller that searches it before it is admitted: a model, or a program.

        It must stay until the returned function is called. Return at once for a model that does not exist. Raises the
        `HeadraceError` that the caller gets.
        """

    @abstractmethod
    def is_ready(self, name: str) -> bool:
        """True if a request to ``name``, which does not serve now, would be answered after a load."""

    @abstractmethod
    def why_not_served(self, name: str) -> str:
        """Return the reason in the index for ``name``, which does not serve now."""

    def changed(self) -> None:
        """Called after every change of the served models."""

    async def load(self, name: str) -> None:
        """Load ``name`` on request of a client. Raises `HeadraceError`."""
        raise Unsupported(f"a load by name is not allowed in model control mode '{self.name}'")

    async def unload(self, name: str) -> None:
        """Unload ``name`` on request of a client. Raises `HeadraceError`."""
        raise Unsupported(f"an unload by name is not allowed in model control mode '{self.name}'")

    def stop(self) -> None:
        """Load no further models: the server stops."""


def control_mode(options: ControlOptions, interceptors: Iterable[Interceptor]) -> ControlMode | None:
    """Return the control mode among ``interceptors``; None if the options choose one of core's. Raises `ConfigError` if
    there is none of that name."""
    modes = [each for each in interceptors if isinstance(each, ControlMode)]
    check_control_mode(options.model_control_mode, map(type, modes))
    return modes[0] if modes else None


def check_control_mode(name: str, kinds: Iterable[type[Interceptor]]) -> None:
    """Raise `ConfigError` unless ``name`` is a control mode of core or one of ``kinds``, which are read only then."""
    if name in CONTROL_MODES:
        return
    modes = [*CONTROL_MODES, *(kind.name for kind in kinds if issubclass(kind, ControlMode))]
    if name not in modes:
        hint = missing("control mode", name)
        text = f"invalid argument for --model-control-mode, must be one of {', '.join(modes)}. Got {name}"
        raise ConfigError(f'Bad option: "--model-control-mode".\n{text}' + (hint and f". {hint}"))


@asynccontextmanager
async def holding(mode: ControlMode | None, name: str) -> AsyncIterator[None]:
    """Wait until ``mode``, if there is one, has loaded ``name``. The model stays until the context ends."""
    release = None if mode is None else await mode.hold(name)
    try:
        yield
    finally:
        if release is not None:
            release()
