"""Converts vLLM's errors to the server's."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace import BackendError, HeadraceError, InvalidArgument, ResourceExhausted, Unavailable, one_line

log = logging.getLogger("headrace.vllm")


def error_of(error: Exception, model: str, check: Callable[[], None]) -> HeadraceError:
    """Return ``error`` as the error of a request to ``model``. Call ``check`` if the engine has died."""
    if isinstance(error, HeadraceError):
        return error
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    text = one_line(str(error))[:500]
    if isinstance(error, EngineDeadError):
        check()
        return Unavailable(f"the vLLM engine of model '{model}' has died; it is being started again")
    if isinstance(error, GracefulHTTPError):
        return ResourceExhausted(f"model '{model}': {text}")
    if isinstance(error, (VLLMClientError, ValueError, TypeError)):
        return InvalidArgument(f"model '{model}': {text}")
    log.error("model '%s' failed a request", model, exc_info=error)
    cause = error.__cause__ or error
    return BackendError(f"model '{model}': {type(cause).__name__}: {one_line(str(cause))[:500]}")
