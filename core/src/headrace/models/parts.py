"""The parts that a model's config names: where they are looked up, and how a backend is made."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.backends.base import Backend
from headrace.config.options import ServerOptions
from headrace.errors import LoadError, PluginError, summary


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


def make_backend(name: str, backends: Parts, hook: Any, options: ServerOptions) -> Backend:
    """The backend ``name``. Raises as `find_backend`, and what its class raises."""
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
