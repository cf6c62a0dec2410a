"""The log of a server: Triton's line formats, or one JSON object per line.

Configures logging only when the command line asks for it: an embedded server leaves that to its
host. What any logger says from level INFO on is in the log, in its format; ``--log-verbose`` lets the
loggers below ``headrace`` say more, and what stands at which level is Triton's choice. A message is
one record and one line, whatever text of a caller is in it: control characters are escaped
(docs/spec/behaviours.md section 12.2). Extras that a record may carry: ``table``, lines that follow the
message, made by `draw_table`, and ``request_id``, ``model``, ``version`` and ``code``, which the JSON
format shows as fields.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from headrace.config.options import LogFormat, ServerOptions
from headrace.telemetry import log_output, pacing
from headrace.telemetry.log_output import LogOutput, speaker
from headrace.telemetry.pacing import LogRateLimit

#: Shown from ``--log-verbose=1`` on: requests, completed configs, warm-up.
VERBOSE: Final = logging.DEBUG
#: From 2 on: the steps of loads and unloads.
VERBOSE_2: Final = VERBOSE - 1


def threshold(level: int) -> int:
    """The lowest level of `logging` that ``--log-verbose=level`` shows."""
    return max(VERBOSE + 1 - level, 1) if level > 0 else logging.INFO


LOGGER = logging.getLogger("headrace")
#: The packages of this distribution, which log by the level of the settings.
_OURS = (LOGGER, *(logging.getLogger(f"headrace_{name}") for name in ("engines", "grpc", "http")))
_ROOT = logging.getLogger()
_CONTEXT = ("request_id", "model", "version", "code", "left_out")
#: Loggers of transports that are not ours: what they say is what peers make them say.
_DRIVEN_BY_PEERS = frozenset(("asyncio", "grpc", "h11", "h2", "hypercorn", "wsproto"))
#: What is left of a long message: callers' text, or a recursion without end, may have made it. What happened stands
#: at the end of a traceback.
_HEAD, _TAIL = 16 * 1024, 8 * 1024
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
        """The lowest level logged."""
        return threshold(self.verbose_level)

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
        """Log by ``settings`` from now on, into the file opened at the start."""
        self.settings = settings
        self._handler.setFormatter(_formatter(settings.format, self._escape))
        for logger in _OURS:
            logger.setLevel(settings.threshold)

    def close(self) -> None:
        """Say what was left out, and leave logging as it was found."""
        self._end_prints()
        pacing.flush()
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
    """``text`` as a JSON string in quotes, on one line, with nothing that a terminal obeys."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(text, ensure_ascii=False))


class LineFormatter(logging.Formatter):
    """``I0520 20:03:25.829575 3355 file.py:441] "message"``, or the ISO 8601 variant; times in UTC."""

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
        if model := speaker():
            context.setdefault("model", model)
        return json.dumps(fields | context, default=str)


def _formatter(log_format: LogFormat, escaped: bool) -> logging.Formatter:
    return JsonFormatter() if log_format == "json" else LineFormatter(log_format, escaped)


def _letter(record: logging.LogRecord) -> str:
    if record.levelno >= logging.ERROR:
        return "E"
    return "W" if record.levelno >= logging.WARNING else "I"


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The message, and the traceback under it if there is one."""
    message = record.getMessage()
    if record.exc_info:
        message = f"{message}\n{formatter.formatException(record.exc_info)}"
    return message if len(message) <= _HEAD + _TAIL else _without_middle(message)


def _without_middle(message: str) -> str:
    return f"{message[:_HEAD]}... ({len(message) - _HEAD - _TAIL} characters) ...{message[-_TAIL:]}"


def _nothing() -> None:
    """Prints are as they were."""


def _log_thread_end(end: threading.ExceptHookArgs) -> None:
    if end.exc_type is not SystemExit:
        name = end.thread.name if end.thread is not None else "?"
        LOGGER.error("thread '%s' ended", name, exc_info=end.exc_value)


def _log_unraisable(found: sys.UnraisableHookArgs) -> None:
    LOGGER.error(
        "%s: %r", found.err_msg or "an error that nobody could be told", found.object, exc_info=found.exc_value
    )


def draw_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A boxed table. A cell is one line: control characters in it are escaped."""
    cells = [[one_line(value) for value in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule]) + "\n"


def one_line(value: str) -> str:
    """``value`` with its control characters escaped."""
    return value if value.isprintable() else escape(value)[1:-1]
