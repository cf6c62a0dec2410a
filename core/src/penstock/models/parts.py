"""The parts that a model's config names: where they are looked up, and how a backend is made."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.backends.base import Backend
from penstock.config.options import ServerOptions
from penstock.errors import LoadError, PluginError, summary


class Parts(Protocol):
    """Where classes are looked up: a registry. ``get`` raises `LoadError` with the reason."""

    def get(self, name: str) -> Any: ...


def make_backend(name: str, backends: Parts, hook: Any, options: ServerOptions) -> Backend:
    """The backend ``name``: of a class of ``backends``, or of one that a plugin finds.

    Raises `LoadError` with the reason if there is none, and what the class raises.
    """
    try:
        found = backends.get(name)
    except LoadError:
        found = _ask(name, hook, options)
        if found is None:
            raise
    backend: Backend = found(backend_settings(name, found, options))
    return backend


def _ask(name: str, hook: Any, options: ServerOptions) -> Any:
    try:
        return hook.find_backend(name=name, options=options)
    except Exception as error:  # a stranger's code
        raise PluginError(f"a plugin failed to find backend '{name}': {summary(error)}") from error


def backend_settings(name: str, backend: type[Backend], options: ServerOptions) -> dict[str, str]:
    """What ``--backend-config`` says to ``backend`` under ``name``: the global settings and its own.

    With ``--dev``, those that it has for development stand where it says nothing.
    """
    default = backend.dev_options if options.dev else {}
    return {**default, **options.backend_config.get("", {}), **options.backend_config.get(name, {})}
