"""Has a backend load an instance, whether in a thread of the server or in a process of its own.

A backend is a stranger: what it raises, `SystemExit` and the like included, is an error of its model,
and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from headrace.backends.base import AnyInstance, Backend, Model
from headrace.errors import HeadraceError, LoadError, summary

log = logging.getLogger(__name__)


def share(backend: Backend, model: Model, undo: ExitStack, logger: logging.Logger | None = None) -> Any:
    """What ``backend`` lets the instances of ``model`` share; ``undo`` has it released. Raises as `failures_worded`."""
    with failures_worded(backend, model.name, logger):
        shared = backend.share(model)
    undo.callback(_unshare, backend, model.name, shared)
    return shared


def load_instance(backend: Backend, model: Model) -> AnyInstance:
    """An instance of ``model``, warmed up; it is closed if that fails. Raises what the backend raises."""
    instance = backend.load(model)
    try:
        instance.warm_up()
    except BaseException:
        close_instance(instance, model.instance_name)
        raise
    return instance


def close_instance(instance: AnyInstance, name: str) -> None:
    """Close ``instance``; what it raises is logged, since nobody is left to be told."""
    try:
        instance.close()
    except BaseException:
        log.exception("model instance '%s' failed to close", name)


@contextmanager
def failures_worded(backend: Backend, model: str, logger: logging.Logger | None = None) -> Iterator[None]:
    """Make a `LoadError` of what ``backend`` raises for ``model`` that is no error of ours.

    ``logger`` is given the traceback; a child, which sends it to its server, has none.
    """
    try:
        yield
    except HeadraceError:
        raise
    except BaseException as error:
        if logger is not None:
            logger.error("backend '%s' failed to load '%s'", backend.name, model, exc_info=error)
        raise LoadError(f"backend '{backend.name}' failed to load '{model}': {summary(error)}") from error


def _unshare(backend: Backend, model: str, shared: Any) -> None:
    try:
        backend.unshare(shared)
    except BaseException:
        log.exception("backend '%s' failed to release what the instances of '%s' shared", backend.name, model)
