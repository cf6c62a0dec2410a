"""Calls of a model to its server: log, load and unload models, check readiness."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import IntEnum
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING, ClassVar

from headrace import HeadraceError, LogLevel
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.arguments import Text, choice, lines, text, truth
from triton_python_backend_utils.error import TritonModelException
from triton_python_backend_utils.runtime import ModelPhase

if TYPE_CHECKING:
    from headrace import Services


class Logger:
    """Writes to the server's log, with the file and line of the caller; without a server, to stdout."""

    class LogLevel(IntEnum):
        """Source: Triton's LogLevel."""

        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    @staticmethod
    def log(message: Text, level: LogLevel = INFO) -> None:
        """Raise TypeError for a message that is no text, and for a level that is no `LogLevel`."""
        _write(message, level, sys._getframe(1))

    @staticmethod
    def log_info(message: Text) -> None:
        _write(message, Logger.INFO, sys._getframe(1))

    @staticmethod
    def log_warn(message: Text) -> None:
        _write(message, Logger.WARNING, sys._getframe(1))

    @staticmethod
    def log_error(message: Text) -> None:
        _write(message, Logger.ERROR, sys._getframe(1))

    @staticmethod
    def log_verbose(message: Text) -> None:
        _write(message, Logger.VERBOSE, sys._getframe(1))


_NAMES: dict[Logger.LogLevel, LogLevel] = {
    Logger.INFO: "info",
    Logger.WARNING: "warning",
    Logger.ERROR: "error",
    Logger.VERBOSE: "verbose",
}


def _write(message: Text, level: Logger.LogLevel, caller: FrameType) -> None:
    message = lines(message, "a log message")
    name = _NAMES[choice(level, Logger.LogLevel, "the level of a log message")]
    runtime = runtimes.current()
    if runtime is None or runtime.services is None:
        print(f"{name}: {message}")
    else:
        file = PurePath(caller.f_code.co_filename).name
        runtime.services.log(name, message, file, caller.f_lineno)


_LOAD = "Failed to load model: "
_UNLOAD = "Failed to unload model: "
_READY = "Failed to check model readiness: "


def load_model(model_name: Text, config: Text = "", files: Mapping[Text, bytes] | None = None) -> None:
    """Load or reload ``model_name``, and return once it is ready.

    ``config`` is JSON that replaces the repository's config. ``files`` maps ``file:<path>`` to contents that replace
    the repository's files. Raises `TritonModelException`, and TypeError for other arguments.
    """
    name, json = text(model_name, "model_name"), text(config, "config")
    contents = _files(name, files)
    services = _services(_LOAD)
    try:
        services.load_model(name, json, contents)
    except HeadraceError as error:
        raise TritonModelException(f"{_LOAD}{error}") from error


def unload_model(model_name: Text, unload_dependents: bool = False) -> None:
    """Unload ``model_name``. When this returns, it accepts no requests. Raises `TritonModelException`."""
    name, with_dependents = text(model_name, "model_name"), truth(unload_dependents, "unload_dependents")
    services = _services(_UNLOAD)
    try:
        services.unload_model(name, with_dependents)
    except HeadraceError as error:
        raise TritonModelException(f"{_UNLOAD}{error}") from error


def is_model_ready(model_name: Text, model_version: Text = "") -> bool:
    """True if ``model_name`` (that version, or any) accepts requests. Raises `TritonModelException`."""
    name, version = text(model_name, "model_name"), text(model_version, "model_version")
    services = _services(_READY)
    try:
        return services.is_model_ready(name, version)
    except HeadraceError as error:
        raise TritonModelException(f"{_READY}{error}") from error


def get_model_dir() -> str:
    """Return the directory of the calling model's version, absolute or as the repository was named.

    Valid as soon as ``model.py`` is imported. Raises `TritonModelException` if the caller is no model.
    """
    runtime = runtimes.current()
    if runtime is None:
        raise TritonModelException("Failed to get model directory: no model of a server calls.")
    return runtime.model_dir


def _files(model_name: str, files: Mapping[Text, bytes] | None) -> dict[str, bytes]:
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    for path, contents in files.items():
        if not isinstance(contents, bytes):
            raise TypeError(
                f"file {path!r} of model '{model_name}' must be bytes, found type '{type(contents).__name__}'"
            )
    return {text(path, f"a file path of model '{model_name}'"): contents for path, contents in files.items()}


def _services(failure: str) -> Services:
    """Return the services of the calling model, if it may load models now (docs/spec/behaviours.md section 9.2)."""
    runtime = runtimes.current()
    if runtime is not None and runtime.phase in (ModelPhase.COMPLETING, ModelPhase.FINALIZING):
        raise TritonModelException(f"{failure}this is not supported during the '{runtime.phase.value}' function.")
    if runtime is None or runtime.services is None:
        raise TritonModelException(f"{failure}there is no server.")
    return runtime.services
