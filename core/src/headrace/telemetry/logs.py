"""The log of a server: Triton's line formats, or one JSON object per line.

The command line configures logging; an embedded server does not, because the embedding program does. Records of level
INFO and above, from any logger, are in the log. ``--log-verbose`` adds lower levels of Headrace's own loggers; the
level of each message is Triton's. A message is one record and one line, whatever text of a caller it contains: control
characters are escaped (docs/spec/behaviours.md section 12.2).

A record may have these extras: ``table``, lines after the message, made by `draw_table`; and ``request_id``, ``model``,
``version`` and ``code``, which are fields in the JSON format.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from headrace.config.option_parts import LogFormat, LogOptions
from headrace.telemetry import log_limits, log_output
from headrace.telemetry.log_limits import LogRateLimit
from headrace.telemetry.log_output import LogOutput, current_model

#: Level of records that ``--log-verbose=1`` shows: requests, completed configs, warm-up.
VERBOSE: Final = logging.DEBUG
#: Level of records that ``--log-verbose=2`` shows: the steps of loads and unloads.
VERBOSE_2: Final = VERBOSE - 1


def threshold(level: int) -> int:
    """Return the lowest `logging` level that ``--log-verbose=level`` shows."""
    return max(VERBOSE + 1 - level, 1) if level > 0 else logging.INFO


LOGGER = logging.getLogger("headrace")
#: The loggers of our own packages. Their level is that of the settings.
_OURS = (
    LOGGER,
    *(
        logging.getLogger(f"headrace_{name}")
        for name in ("cli", "engines", "grpc", "harnesses", "hosts", "http", "loading", "locations", "processes")
    ),
)
_ROOT = logging.getLogger()
_CONTEXT = ("request_id", "model", "version", "code", "left_out")
#: Loggers of other projects' transports. Clients can cause their records, so these have a rate limit.
_DRIVEN_BY_PEERS = frozenset(("asyncio", "grpc", "h11", "h2", "hypercorn", "wsproto"))
#: Characters that are kept of a long message, at its start and at its end. Text of callers or an endless recursion can
#: make it long, and the error is at the end of a traceback.
_HEAD, _TAIL = 16 * 1024, 8 * 1024
#: Characters that json.dumps does not escape, but that terminals or line readers interpret: DEL and C1 controls,
#: Unicode line ends, marks that reverse text, and single surrogates.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The settings of the log. All but ``file`` may change while the server runs."""

    file: str = ""
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: LogFormat = "default"

    @classmethod
    def from_options(cls, options: LogOptions) -> LogSettings:
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
        """The lowest `logging` level that is logged."""
        return threshold(self.verbose_level)

    def allows(self, record: logging.LogRecord) -> bool:
        """True if the settings allow records of this level."""
        if record.levelno >= logging.ERROR:
            return self.error
        if record.levelno >= logging.WARNING:
            return self.warning
        return self.info if record.levelno >= logging.INFO else record.levelno >= self.threshold


class Log:
    """The log of one process, from construction to `close`. Raises OSError if the file cannot be opened."""

    def __init__(self, settings: LogSettings, environ: Mapping[str, str] = os.environ) -> None:
        #: Called after each change of the settings, on the thread of the change.
        self.on_change: list[Callable[[], None]] = []
        self._escape = environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "1") != "0"
        self._handler = LogOutput(settings.file)
        self._foreign = LogRateLimit()
        self._levels = [(logger, logger.level) for logger in (*_OURS, _ROOT)]
        self._hooks = (threading.excepthook, sys.unraisablehook)
        self._handler.addFilter(self._passes)
        self.change(settings)
        _ROOT.setLevel(logging.INFO)
        _ROOT.addHandler(self._handler)
        logging.captureWarnings(True)
        threading.excepthook, sys.unraisablehook = _log_thread_end, _log_unraisable
        self._end_prints = log_output.record_prints() if settings.format == "json" else _nothing

    def change(self, settings: LogSettings) -> None:
        """Use ``settings`` from now on. The file stays the one opened at the start."""
        self.settings = settings
        self._handler.setFormatter(_formatter(settings.format, self._escape))
        for logger in _OURS:
            logger.setLevel(settings.threshold)
        for follow in self.on_change:
            follow()

    def follow(self, add: Callable[[logging.LogRecord], None]) -> None:
        """Call ``add`` with each record that is written, on its thread. It must not block, raise or log."""
        self._handler.addFilter(lambda record: add(record) is None)  # type: ignore[func-returns-value]

    def close(self) -> None:
        """Log the number of omitted records, and restore the logging configuration from before."""
        self._end_prints()
        log_limits.flush()
        _ROOT.removeHandler(self._handler)
        logging.captureWarnings(False)
        threading.excepthook, sys.unraisablehook = self._hooks
        for logger, level in self._levels:
            logger.setLevel(level)
        self._handler.close()

    def _passes(self, record: logging.LogRecord) -> bool:
        if not self.settings.allows(record):
            return False
        return record.name.partition(".")[0] not in _DRIVEN_BY_PEERS or self._foreign.filter(record)


def escape(text: str) -> str:
    """Return ``text`` as a JSON string in quotes, on one line, without characters that a terminal interprets."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", json.dumps(text, ensure_ascii=False))


class LineFormatter(logging.Formatter):
    """Writes ``I0520 20:03:25.829575 3355 file.py:441] "message"``, or the ISO 8601 variant. Times are in UTC."""

    def __init__(self, log_format: LogFormat, escaped: bool = True) -> None:
        super().__init__()
        self._log_format = log_format
        self._escaped = escaped

    def format(self, record: logging.LogRecord) -> str:
        message = _message(self, record)
        shown = escape(message) if self._escaped else message
        line = f"{self._head(record)} {record.filename}:{record.lineno}] {shown}"
        table = getattr(record, "table", "")
        return f"{line}\n{table}" if table else line

    def _head(self, record: logging.LogRecord) -> str:
        letter, time = _letter(record), datetime.fromtimestamp(record.created, timezone.utc)
        if self._log_format == "ISO8601":
            return f"{time:%Y-%m-%dT%H:%M:%SZ} {letter} {record.process}"
        return f"{letter}{time:%m%d %H:%M:%S.%f} {record.process}"


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line, in ASCII."""

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
        if model := current_model():
            context.setdefault("model", model)
        return json.dumps(fields | context, default=str)


def _formatter(log_format: LogFormat, escaped: bool) -> logging.Formatter:
    return JsonFormatter() if log_format == "json" else LineFormatter(log_format, escaped)


def _letter(record: logging.LogRecord) -> str:
    if record.levelno >= logging.ERROR:
        return "E"
    return "W" if record.levelno >= logging.WARNING else "I"


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the message, followed by the traceback if there is one. A very long text loses its middle."""
    message = record.getMessage()
    if record.exc_info:
        message = f"{message}\n{formatter.formatException(record.exc_info)}"
    return message if len(message) <= _HEAD + _TAIL else _without_middle(message)


def _without_middle(message: str) -> str:
    return f"{message[:_HEAD]}... ({len(message) - _HEAD - _TAIL} characters) ...{message[-_TAIL:]}"


def _nothing() -> None:
    """Do nothing: printed lines were not replaced."""


def _log_thread_end(end: threading.ExceptHookArgs) -> None:
    if end.exc_type is not SystemExit:
        name = end.thread.name if end.thread is not None else "?"
        LOGGER.error("thread '%s' ended", name, exc_info=end.exc_value)


def _log_unraisable(raised: sys.UnraisableHookArgs) -> None:
    LOGGER.error(
        "%s: %r", raised.err_msg or "an error that no caller could handle", raised.object, exc_info=raised.exc_value
    )


def draw_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with borders. A cell is one line: control characters in it are escaped."""
    cells = [[one_line(value) for value in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule]) + "\n"


def one_line(value: str) -> str:
    """Return ``value`` with its control characters escaped."""
    return value if value.isprintable() else escape(value)[1:-1]
