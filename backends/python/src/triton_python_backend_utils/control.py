"""Models that a model loads, unloads and asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.error import TritonModelException
from triton_python_backend_utils.runtime import Phase

if TYPE_CHECKING:
    from penstock.backends.services import Services

_LOAD = "Failed to load model: "
_UNLOAD = "Failed to unload model: "
_READY = "Failed to check model readiness: "


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload ``model_name``, and return once it is ready.

    ``config`` is JSON that goes before the repository's; ``files`` maps ``file:<path>`` to contents,
    which go before the repository's. Raises `TritonModelException`.
    """
    services = _services(_LOAD)
    for path, contents in (files or {}).items():
        if not isinstance(contents, bytes):
            raise TypeError(f"file '{path}' of model '{model_name}' must be bytes, found '{type(contents).__name__}'")
    try:
        services.load_model(model_name, config, files or {})
    except PenstockError as error:
        raise TritonModelException(f"{_LOAD}{error}") from error


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload ``model_name``: it takes no more requests once this returns. Raises `TritonModelException`."""
    services = _services(_UNLOAD)
    try:
        services.unload_model(model_name, unload_dependents)
    except PenstockError as error:
        raise TritonModelException(f"{_UNLOAD}{error}") from error


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether requests to ``model_name`` (in that version, or any) would be taken. Raises `TritonModelException`."""
    services = _services(_READY)
    try:
        return services.is_model_ready(model_name, model_version)
    except PenstockError as error:
        raise TritonModelException(f"{_READY}{error}") from error


def _services(failure: str) -> Services:
    """Those of the calling model, if it may load models now (behaviours.md section 9.2)."""
    runtime = runtimes.current()
    if runtime is not None and runtime.phase in (Phase.COMPLETING, Phase.FINALIZING):
        raise TritonModelException(f"{failure}this is not supported during the '{runtime.phase.value}' function.")
    if runtime is None or runtime.services is None:
        raise TritonModelException(f"{failure}there is no server.")
    return runtime.services
