"""Copies a log record on the thread that logs it: texts and numbers only, without references to objects."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, NamedTuple

from headrace_otel.record_queue import RecordQueue

#: The maximum characters of a message and of a traceback.
_LONGEST = 16 * 1024
#: Attributes of a record that Headrace sets, and their names in OpenTelemetry.
_CONTEXT = {"model": "headrace.model", "version": "headrace.version", "request_id": "headrace.request_id"}


class LogLine(NamedTuple):
    """A line of the log. ``time_ns`` is since 1970."""

    time_ns: int
    level: int
    logger: str
    text: str
    attributes: tuple[tuple[str, Any], ...]
    trace_id: bytes
    span_id: bytes


class LogLines:
    """Puts each record of the log into a queue."""

    def __init__(self, queue: RecordQueue) -> None:
        self._queue = queue

    def add(self, record: logging.LogRecord) -> None:
        """Keep ``record``, unless it is one of ours: a failure to send would become another record to send."""
        try:
            if not record.name.startswith("headrace_otel"):
                self._queue.add(_line(record))
        except Exception:  # the log writes why a record cannot be formatted
            self._queue.dropped += 1


def _line(record: logging.LogRecord) -> LogLine:
    attributes: list[tuple[str, Any]] = [
        ("code.file.path", record.pathname),
        ("code.line.number", record.lineno),
        ("thread.name", record.threadName or ""),
    ]
    for name, shown in _CONTEXT.items():
        if (value := getattr(record, name, "")) != "":
            attributes.append((shown, str(value)[:256]))
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        text = "".join(traceback.format_exception(*record.exc_info))
        attributes += [
            ("exception.type", type(error).__qualname__),
            ("exception.message", str(error)[:_LONGEST]),
            ("exception.stacktrace", text[-_LONGEST:]),
        ]
    trace_id, span_id = _span()
    text = record.getMessage()[:_LONGEST]
    return LogLine(int(record.created * 1e9), record.levelno, record.name, text, tuple(attributes), trace_id, span_id)


def _span() -> tuple[bytes, bytes]:
    """Return the ids of the span in which this thread runs, if a model makes spans by OpenTelemetry."""
    tracing = sys.modules.get("opentelemetry.trace")
    if tracing is None:
        return b"", b""
    context = tracing.get_current_span().get_span_context()
    if not context.is_valid:
        return b"", b""
    return context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
