"""Has a backend load an instance, whether in a thread of the server or in a process of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.backends.base import AnyInstance, Backend, Model
from penstock.errors import LoadError, PenstockError, summary


def load_instance(backend: Backend, model: Model) -> AnyInstance:
    """An instance of ``model``, warmed up; it is closed if that fails. Raises what the backend raises."""
    instance = backend.load(model)
    try:
        instance.warm_up()
    except BaseException:
        instance.close()
        raise
    return instance


@contextmanager
def failures_worded(backend: Backend, model: str, logger: logging.Logger | None = None) -> Iterator[None]:
    """Make a `LoadError` of what ``backend`` raises for ``model`` that is no error of ours.

    ``logger`` is given the traceback; a child, which sends it to its server, has none.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if logger is not None:
            logger.error("backend '%s' failed to load '%s'", backend.name, model, exc_info=error)
        raise LoadError(f"backend '{backend.name}' failed to load '{model}': {summary(error)}") from error
