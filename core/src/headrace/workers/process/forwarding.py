"""The log of a child is that of its server."""

from __future__ import annotations

import logging

from headrace.backends.services import LOG_LEVELS, LogLevel, Services


def forward_log(services: Services, level: int) -> None:
    """Send what this process logs at ``level`` or above to the server's log."""
    logger = logging.getLogger("headrace")
    logger.setLevel(level)
    logger.addHandler(_Forwarder(services))
    logger.propagate = False


class _Forwarder(logging.Handler):
    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services

    def emit(self, record: logging.LogRecord) -> None:
        level: LogLevel = next((name for name, floor in LOG_LEVELS.items() if record.levelno >= floor), "verbose")
        self._services.log(level, self.format(record), record.pathname, record.lineno)
