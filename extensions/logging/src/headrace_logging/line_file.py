"""The file of the access log or of the audit log, written by its own thread.

The event loop adds records to a bounded queue and never waits for the file. If the file is slow or its disk is full,
records are dropped and counted. The server's log has one line about it, and the file has a line with their number when
it can be written again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat, starmap
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any, Protocol

from headrace import ConfigError, rate_limited_logger

log = rate_limited_logger(__name__)

#: If this many records wait for the thread, those of the next `GATHER_S` are dropped.
MAX_WAITING = 16_384
#: Records of this time are written together.
GATHER_S = 0.1
#: Records that are formatted and written at once: this keeps the event loop waiting for about 1 ms.
_AT_ONCE = 512
#: So long a stopping server waits for a slow file.
_LAST_S = 2.0
#: The descriptors of paths that are no files.
_STREAMS = {"-": 1, "stderr": 2}


class Lines(Protocol):
    """The form of the lines of a file."""

    def lines(self, records: list[tuple[Any, ...]], since_epoch_ns: int) -> str:
        """Return a line with its newline for each of ``records``.

        ``since_epoch_ns`` is the wall clock minus the monotonic one.
        """

    def dropped_line(self, dropped: int) -> str:
        """Return the line that says how many records were dropped."""


class LineFile:
    """The lines of one server. `add` and `close` are for the event loop, `add_now` for any thread.

    ``lines`` formats records. ``name`` is the name of the file in messages, and ``flag`` the flag of
    ``path``, which may be ``-`` for stdout or ``stderr``. ``written`` counts the lines, and ``size`` is the file's, in
    bytes, when it was last written. The file is opened again after it was moved or removed. Raises `ConfigError` if it
    can not be opened at first.

    ``add`` takes a record and never blocks. Records arrive thousands of times a second, so it is usually the method of
    the queue itself, in C. `_tick` replaces ``add`` when something else must be done::

        _wake_up --a record--> deque.append --no record for GATHER_S---> _wake_up
                               deque.append --MAX_WAITING wait--> _refuse --there is room--> deque.append
    """

    def __init__(self, path: str, lines: Lines, name: str, flag: str) -> None:
        self._path, self._lines, self._name = path, lines, f"{name} '{path}'"
        self.written = self.size = 0
        self._waiting: deque[tuple[Any, ...]] = deque()
        self.add: Callable[[tuple[Any, ...]], object] = self._wake_up
        self._wake = threading.Event()
        self._is_closed = False
        #: Records dropped by the event loop and by the thread, and dropped ones that a line of the file reports.
        self._refused = self._lost = self._reported = 0
        self._is_failing = self._is_torn = False
        try:
            self._descriptor = _open(path)
        except OSError as error:
            reason = "it is a FIFO that nobody reads" if error.errno == errno.ENXIO else error.strerror
            raise ConfigError(f"{flag}={path} can not be opened: {reason}") from error
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """The number of records that were dropped."""
        return self._refused + self._lost

    def add_now(self, record: tuple[Any, ...]) -> None:
        """Add a record that is written at once: for rare records. Any thread. Does not block."""
        if len(self._waiting) >= MAX_WAITING:
            self._refuse(record)
            return
        self._waiting.append(record)
        self._wake.set()

    def _wake_up(self, record: tuple[Any, ...]) -> None:
        self._waiting.append(record)
        self.add = self._waiting.append
        asyncio.get_running_loop().call_later(GATHER_S, self._tick)

    def _refuse(self, record: tuple[Any, ...]) -> None:
        if self.dropped == self._reported:
            log.warning("the %s takes lines too slowly, and records are dropped", self._name)
        self._refused += 1

    def _tick(self) -> None:
        """Wake the thread if records wait. Called every `GATHER_S` while records arrive."""
        waits = len(self._waiting)
        if not waits:
            self.add = self._wake_up
            return
        self.add = self._waiting.append if waits < MAX_WAITING else self._refuse
        self._wake.set()
        asyncio.get_running_loop().call_later(GATHER_S, self._tick)

    def close(self) -> None:
        """Write the waiting records for at most 2 s, and close the file."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(_LAST_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_closed
            if self._waiting:
                self._reopen_if_moved()
            while self._waiting:
                self._write_some()
        if self._path not in _STREAMS:
            os.close(self._descriptor)

    def _write_some(self) -> None:
        """Write at most 512 records. Drop those that cannot be written."""
        count = min(len(self._waiting), _AT_ONCE)
        records = list(starmap(self._waiting.popleft, repeat((), count)))
        unreported = self.dropped - self._reported
        before = ["\n"] * self._is_torn + [self._lines.dropped_line(unreported)] * bool(unreported)
        since_epoch_ns = time_ns() - monotonic_ns()
        data = "".join([*before, self._lines.lines(records, since_epoch_ns)]).encode()
        done, failure = 0, None
        try:
            while done < len(data):
                done += os.write(self._descriptor, memoryview(data)[done:])
        except OSError as error:
            failure = error
        if done:
            self._is_torn = not data.endswith(b"\n", 0, done)
        lines = data.count(b"\n", 0, done)
        if lines >= len(before):
            self._reported += unreported
        written = max(0, lines - len(before))
        self.written += written
        self._lost += len(records) - written
        if failure is None and self._is_failing:
            log.warning("the %s is written again; %d records were dropped", self._name, unreported)
        elif failure is not None and not self._is_failing:
            log.warning("the %s can not be written, and records are dropped: %s", self._name, failure)
        self._is_failing = failure is not None

    def _reopen_if_moved(self) -> None:
        """Open the path again if it is another file or missing, because the log was rotated."""
        ours = os.fstat(self._descriptor)
        self.size = ours.st_size
        if self._path in _STREAMS:
            return
        with suppress(FileNotFoundError):
            there = Path(self._path).stat()
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                return
        try:
            opened = _open(self._path)
        except OSError as error:  # the old file stays in use
            log.warning("the %s can not be opened again: %s", self._name, error.strerror)
            return
        os.close(self._descriptor)
        self._descriptor, self._is_torn, self.size = opened, False, 0


def _open(path: str) -> int:
    """Open ``path`` to append to it. Does not wait for the reader of a FIFO."""
    if path in _STREAMS:
        return _STREAMS[path]
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
    os.set_blocking(descriptor, True)
    return descriptor
