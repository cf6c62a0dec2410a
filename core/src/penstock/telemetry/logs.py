"""The log of a server: Triton's line formats, or one JSON object per line.

Configures the ``penstock`` logger and nothing else, and only when the command line asks for it: an
embedded server leaves logging to its host. A message is one record and one line, whatever text of
a caller is in it: control characters are escaped (behaviours.md section 12.2). Extras that a
record may carry: ``table``, lines that follow the message, made by `penstock.telemetry.tables`,
and ``request_id``, ``model`` and ``version``, which the JSON form shows as fields.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from penstock.config.options import LogFormat, ServerOptions

LOGGER = logging.getLogger("penstock")
_CONTEXT = ("request_id", "model", "version")
#: What json.dumps leaves alone and a terminal or a reader of lines does not: DEL and C1 controls,
#: the Unicode line ends, marks that reverse text, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, where and how; all but ``file`` may change while the server runs."""

    file: str = ""
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: LogFormat = "default"

    @classmethod
    def from_options(cls, options: ServerOptions) -> LogSettings:
        return cls(
            file=options.log_file,
            info=options.log_info,
            warning=options.log_warning,
            error=options.log_error,
            verbose_level=options.log_verbose,
            format=options.log_format,
        )

    @property
    def threshold(self) -> int:
        """The lowest level logged. Verbosity 1 is ``logging.DEBUG``, and each further one 1 less."""
        return max(logging.DEBUG + 1 - self.verbose_level, 1) if self.verbose_level > 0 else logging.INFO

    def allows(self, record: logging.LogRecord) -> bool:
        """Whether the toggle of the record's level is on."""
        if record.levelno >= logging.ERROR:
            return self.error
        if record.levelno >= logging.WARNING:
            return self.warning
        return self.info if record.levelno >= logging.INFO else record.levelno >= self.threshold


class Log:
    """The log of one process, from construction to `close`. Raises OSError if the file does not open."""

    def __init__(self, settings: LogSettings, environ: Mapping[str, str] = os.environ) -> None:
        self._escape = environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "1") != "0"
        self._handler = _open(settings.file)
        self._before = (LOGGER.level, LOGGER.propagate)
        self._handler.addFilter(lambda record: self.settings.allows(record))
        self.change(settings)
        LOGGER.addHandler(self._handler)
        LOGGER.propagate = False

    def change(self, settings: LogSettings) -> None:
        """Log by ``settings`` from now on, into the file opened at the start."""
        self.settings = settings
        self._handler.setFormatter(_formatter(settings.format, self._escape))
        LOGGER.setLevel(settings.threshold)

    def close(self) -> None:
        """Leave the logger as it was found."""
        LOGGER.removeHandler(self._handler)
        level, LOGGER.propagate = self._before
        LOGGER.setLevel(level)
        self._handler.close()


def escape(text: str) -> str:
    """``text`` as a JSON string in quotes, on one line, with nothing that a terminal obeys."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(text, ensure_ascii=False))


class LineFormatter(logging.Formatter):
    """``I0520 20:03:25.829575 3355 file.py:441] "message"``, or the ISO 8601 variant; times in UTC."""

    def __init__(self, form: LogFormat, escaped: bool = True) -> None:
        super().__init__()
        self._form = form
        self._escaped = escaped

    def format(self, record: logging.LogRecord) -> str:
        message = _message(self, record)
        shown = escape(message) if self._escaped else message
        line = f"{self._head(record)} {record.filename}:{record.lineno}] {shown}"
        table = getattr(record, "table", "")
        return f"{line}\n{table}" if table else line

    def _head(self, record: logging.LogRecord) -> str:
        letter, time = _letter(record), datetime.fromtimestamp(record.created, timezone.utc)
        if self._form == "ISO8601":
            return f"{time:%Y-%m-%dT%H:%M:%SZ} {letter} {record.process}"
        return f"{letter}{time:%m%d %H:%M:%S.%f} {record.process}"


class JsonFormatter(logging.Formatter):
    """One object per line, ASCII only."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds"),
            "level": "VERBOSE" if record.levelno < logging.INFO else record.levelname,
            "message": _message(self, record),
            "logger": record.name,
            "file": record.filename,
            "line": record.lineno,
            "process": record.process,
            "thread": record.threadName,
        }
        context = {name: getattr(record, name) for name in (*_CONTEXT, "table") if hasattr(record, name)}
        return json.dumps(fields | context, default=str)


def _open(path: str) -> logging.Handler:
    return logging.FileHandler(path, encoding="utf-8", errors="backslashreplace") if path else logging.StreamHandler()


def _formatter(form: LogFormat, escaped: bool) -> logging.Formatter:
    return JsonFormatter() if form == "json" else LineFormatter(form, escaped)


def _letter(record: logging.LogRecord) -> str:
    if record.levelno >= logging.ERROR:
        return "E"
    return "W" if record.levelno >= logging.WARNING else "I"


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The message, and the traceback under it if there is one."""
    message = record.getMessage()
    return f"{message}\n{formatter.formatException(record.exc_info)}" if record.exc_info else message
