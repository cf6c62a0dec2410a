"""The server's log."""

from __future__ import annotations

import sys
from enum import IntEnum
from pathlib import PurePath
from types import FrameType
from typing import ClassVar

from headrace import LogLevel
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.arguments import Text, choice, lines


class Logger:
    """Writes to the server's log, as from the line that calls; to stdout where there is no server."""

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
    def log(message: Text, level: int = INFO) -> None:
        """Raises TypeError for a message that is no text, and for an unknown level."""
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


def _write(message: Text, level: int, caller: FrameType) -> None:
    message = lines(message, "a log message")
    name = _NAMES[choice(level, Logger.LogLevel, "the level of a log message")]
    runtime = runtimes.current()
    if runtime is None or runtime.services is None:
        print(f"{name}: {message}")
    else:
        file = PurePath(caller.f_code.co_filename).name
        runtime.services.log(name, message, file, caller.f_lineno)
