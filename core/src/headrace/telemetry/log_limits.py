"""Rate limits for log lines that callers or failing models can cause.

`rate_limited_logger` returns a logger for such lines. Per kind, it writes at most `BURST` records in `WINDOW_S`, then
one line with the number of records that it left out. A kind is one place in the code together with one model. For loads
that are retried from the same files, `without_repeats` writes each line only once.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakSet

from headrace.telemetry.log_output import current_model

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

#: At most `BURST` records of one kind are written per `WINDOW_S`.
BURST = 10
WINDOW_S = 10.0
#: Kinds that are counted separately. There is a limit because callers choose some of the model names.
_KINDS = 256
#: Characters of the sample message in the line that reports omitted records.
_HEAD = 200

_rate_limits: WeakSet[LogRateLimit] = WeakSet()


class _Kind:
    """The records of one kind in one window; ``sample`` is the last one that was left out."""

    __slots__ = ("began", "count", "sample")

    def __init__(self, began: float) -> None:
        self.began = began
        self.count = 0
        self.sample: logging.LogRecord | None = None


class LogRateLimit(logging.Filter):
    """Passes `BURST` records of a kind per `WINDOW_S`, and logs at the end of the window how many it left out.

    Verbose records are neither counted nor left out. Any thread.
    """

    def __init__(self, burst: int = BURST, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._burst = burst
        self._window_s = window_s
        self._kinds: dict[object, _Kind] = {}
        self._lock = threading.Lock()
        self._is_waiting = False
        _rate_limits.add(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """True if ``record`` is written."""
        if record.levelno < logging.INFO or hasattr(record, "left_out"):
            return True
        now = monotonic()
        with self._lock:
            kind = self._kind(record, now)
            kind.count += 1
            if kind.count <= self._burst:
                return True
            kind.sample = record
            must_wait, self._is_waiting = not self._is_waiting, True
        if must_wait:
            self._wait()
        return False

    def flush(self) -> None:
        """Log now the number of omitted records, and begin a new window."""
        with self._lock:
            kinds, self._kinds, self._is_waiting = list(self._kinds.values()), {}, False
        for kind in kinds:
            if kind.sample is not None:
                _report(kind.sample, kind.count - self._burst)

    def _kind(self, record: logging.LogRecord, now: float) -> _Kind:
        key = (record.pathname, record.lineno, getattr(record, "model", "") or current_model())
        entry = self._kinds.get(key)
        if entry is None or (now - entry.began >= self._window_s and entry.sample is None):
            if entry is None and len(self._kinds) >= _KINDS:
                key = (record.pathname, record.lineno, "")  # all further models share one kind
                entry = self._kinds.get(key)
                if entry is not None:
                    return entry
            entry = self._kinds[key] = _Kind(now)
        return entry

    def _wait(self) -> None:
        """Arrange a call of `flush` at the end of the window."""
        if (loop := _running_loop()) is not None:
            loop.call_later(self._window_s, self.flush)
            return
        timer = threading.Timer(self._window_s, self.flush)
        timer.daemon = True
        timer.start()


def rate_limited_logger(name: str) -> logging.Logger:
    """Return the logger ``name`` with a rate limit: at most 10 records of one kind in 10 s."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, LogRateLimit) for each in logger.filters):
        logger.addFilter(LogRateLimit())
    return logger


_written: ContextVar[set[str] | None] = ContextVar("_written", default=None)


def logger_without_repeats(name: str) -> logging.Logger:
    """Return the logger ``name``, to which `without_repeats` applies."""
    logger = logging.getLogger(name)
    if _is_new not in logger.filters:
        logger.addFilter(_is_new)
    return logger


@contextlib.contextmanager
def without_repeats(written: set[str]) -> Iterator[None]:
    """Write no line of a logger of `logger_without_repeats` whose text is in ``written``, and add each that is written.

    It applies to this task and to the tasks that it starts.
    """
    before = _written.set(written)
    try:
        yield
    finally:
        _written.reset(before)


def _is_new(record: logging.LogRecord) -> bool:
    written = _written.get()
    if written is None or record.levelno < logging.INFO:
        return True
    text = record.getMessage()
    is_new = text not in written
    written.add(text)
    return is_new


def flush() -> None:
    """Log now the number of records that all rate limits have omitted. Called before the log closes."""
    for rate_limit in tuple(_rate_limits):
        rate_limit.flush()


def _running_loop() -> AbstractEventLoop | None:
    """Return the running event loop of this thread, or None. Does not import asyncio: model processes have no loop."""
    if "asyncio" not in sys.modules:
        return None
    from asyncio import _get_running_loop

    return _get_running_loop()


def _report(sample: logging.LogRecord, count: int) -> None:
    text = sample.getMessage()
    head = text if len(text) <= _HEAD else f"{text[:_HEAD]}..."
    extra = {name: getattr(sample, name) for name in ("model",) if hasattr(sample, name)}
    record = logging.getLogger(sample.name).makeRecord(
        sample.name,
        sample.levelno,
        sample.pathname,
        sample.lineno,
        "%d more lines like this were left out: %s",
        (count, head),
        None,
        sample.funcName,
        {**extra, "left_out": count},
    )
    with contextlib.suppress(Exception):  # a handler of an embedding program may raise, and no caller could handle it
        logging.getLogger(sample.name).handle(record)
