"""Bounds what others can make the server write into its log.

A line that callers cause, or a model that fails, comes as often as they like. So the loggers of
such lines are `paced`: of each kind some are written, then none for a while, and then how many were
left out. One kind is one place in the code and one model. What is tried again and again from the same files says each
line once (`saying_once`).
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

from headrace.telemetry.log_output import speaker

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

#: Of one kind, so many records in so many seconds.
BURST = 10
WINDOW_S = 10.0
#: Kinds that are told apart; callers choose some of the names.
_KINDS = 256
#: Of a message that stands for those that were left out.
_HEAD = 200

_paces: WeakSet[LogRateLimit] = WeakSet()


class _Kind:
    """What one window has seen of one kind; ``sample`` is the last record that was left out."""

    __slots__ = ("began", "count", "sample")

    def __init__(self, began: float) -> None:
        self.began = began
        self.count = 0
        self.sample: logging.LogRecord | None = None


class LogRateLimit(logging.Filter):
    """Lets through `BURST` records of a kind in `WINDOW_S`, and says at the end how many more there were.

    Verbose records are not counted: whoever asks for them wants each. Any thread.
    """

    def __init__(self, burst: int = BURST, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._burst = burst
        self._window_s = window_s
        self._kinds: dict[object, _Kind] = {}
        self._lock = threading.Lock()
        self._is_waiting = False
        _paces.add(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is to be written."""
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
        """Say now what was left out, and begin anew."""
        with self._lock:
            kinds, self._kinds, self._is_waiting = list(self._kinds.values()), {}, False
        for kind in kinds:
            if kind.sample is not None:
                _tell(kind.sample, kind.count - self._burst)

    def _kind(self, record: logging.LogRecord, now: float) -> _Kind:
        key = (record.pathname, record.lineno, getattr(record, "model", "") or speaker())
        found = self._kinds.get(key)
        if found is None or (now - found.began >= self._window_s and found.sample is None):
            if found is None and len(self._kinds) >= _KINDS:
                key = (record.pathname, record.lineno, "")  # as one
                found = self._kinds.get(key)
                if found is not None:
                    return found
            found = self._kinds[key] = _Kind(now)
        return found

    def _wait(self) -> None:
        """Have `flush` called when the window is over."""
        if (loop := _running_loop()) is not None:
            loop.call_later(self._window_s, self.flush)
            return
        timer = threading.Timer(self._window_s, self.flush)
        timer.daemon = True
        timer.start()


def paced(name: str) -> logging.Logger:
    """The logger ``name``, which bounds what it writes from now on."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, LogRateLimit) for each in logger.filters):
        logger.addFilter(LogRateLimit())
    return logger


_said: ContextVar[set[str] | None] = ContextVar("_said", default=None)


def once(name: str) -> logging.Logger:
    """Return the logger ``name``, which obeys `saying_once`."""
    logger = logging.getLogger(name)
    if _is_new not in logger.filters:
        logger.addFilter(_is_new)
    return logger


@contextlib.contextmanager
def saying_once(said: set[str]) -> Iterator[None]:
    """Write no line of a `once` logger whose text is in ``said``, and add each that is written.

    Holds in this task, and in those that it starts.
    """
    before = _said.set(said)
    try:
        yield
    finally:
        _said.reset(before)


def _is_new(record: logging.LogRecord) -> bool:
    said = _said.get()
    if said is None or record.levelno < logging.INFO:
        return True
    text = record.getMessage()
    is_new = text not in said
    said.add(text)
    return is_new


def flush() -> None:
    """Say now what all paced loggers have left out: they will not be asked again."""
    for pace in tuple(_paces):
        pace.flush()


def _running_loop() -> AbstractEventLoop | None:
    """That of this thread, in a process that has any: the children of a server have none."""
    if "asyncio" not in sys.modules:
        return None
    from asyncio import _get_running_loop

    return _get_running_loop()


def _tell(sample: logging.LogRecord, count: int) -> None:
    text = sample.getMessage()
    head = text if len(text) <= _HEAD else f"{text[:_HEAD]}..."
    extra = {name: getattr(sample, name) for name in ("model",) if hasattr(sample, name)}
    told = logging.getLogger(sample.name).makeRecord(
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
    with contextlib.suppress(Exception):  # a host's handler: nobody waits for this line
        logging.getLogger(sample.name).handle(told)
