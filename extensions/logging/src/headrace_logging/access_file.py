"""The file of the access log, written by a thread of its own.

The event loop adds records to a bounded queue and never waits for the file. If the file is slow or its disk is full,
records are dropped and counted: the log of the server says so once, and the access log says how many when it can be
written again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headrace import ConfigError, rate_limited_logger
from headrace_logging.access_lines import Access

log = rate_limited_logger(__name__)

#: Records that wait for the thread; further ones are dropped.
MOST = 16_384
#: Records of this time are written together.
GATHER_S = 0.1
#: Records that are written by one call of the system.
_AT_ONCE = 1024
#: So long a stopping server waits for a slow file.
_LAST_S = 2.0


class AccessFile:
    """The lines of one server. `add` and `close` are for the event loop, everything else is the thread's.

    ``form`` makes a line of a record, and ``note`` one of a number of dropped records. ``written`` counts records. The
    file is opened anew when it was moved or removed. Raises `ConfigError` if it can not be opened at first.
    """

    def __init__(self, path: str, form: Callable[[Access], str], note: Callable[[int], str]) -> None:
        self._path, self._form, self._note = path, form, note
        self.written = 0
        self._waiting: deque[Access] = deque()
        self._wake = threading.Event()
        self._is_woken = self._is_closed = False
        #: Records that `add` has dropped, that the thread has dropped, and those of both that the file tells of.
        self._refused = self._lost = self._told = 0
        self._is_failing = self._is_torn = False
        try:
            self._descriptor = _open(path)
        except OSError as error:
            reason = "it is a FIFO that nobody reads" if error.errno == errno.ENXIO else error.strerror
            raise ConfigError(f"--access-log-file={path} can not be opened: {reason}") from error
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """The number of records that were dropped."""
        return self._refused + self._lost

    def add(self, access: Access) -> None:
        """Let the thread write ``access`` soon, or drop it if too many wait. Never blocks."""
        waiting = self._waiting
        if len(waiting) < MOST:
            waiting.append(access)
        else:
            if self.dropped == self._told:
                log.warning("the access log '%s' takes lines too slowly, and records are dropped", self._path)
            self._refused += 1
        if not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_later(GATHER_S, self._wake.set)

    def close(self) -> None:
        """Write what waits, for at most two seconds, and close the file."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(_LAST_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait()
            self._wake.clear()
            self._is_woken = False  # before the queue is read: a record that comes later wakes the thread again
            if self._waiting:
                self._reopen_if_moved()
            while self._waiting:
                self._write_some()
        if self._path != "-":
            os.close(self._descriptor)

    def _write_some(self) -> None:
        """Write at most 1,024 records. Drop those that the file does not take."""
        waiting, form = self._waiting, self._form
        records = [waiting.popleft() for _ in range(min(len(waiting), _AT_ONCE))]
        untold = self.dropped - self._told
        before = [""] * self._is_torn + [self._note(untold)] * bool(untold)
        data = "".join([f"{line}\n" for line in (*before, *map(form, records))]).encode()
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
            self._told += untold
        kept = max(0, lines - len(before))
        self.written += kept
        self._lost += len(records) - kept
        if failure is None and self._is_failing:
            log.warning("the access log '%s' is written again; %d records were dropped", self._path, untold)
        elif failure is not None and not self._is_failing:
            log.warning("the access log '%s' can not be written, and records are dropped: %s", self._path, failure)
        self._is_failing = failure is not None

    def _reopen_if_moved(self) -> None:
        """Open the path again if another file is there, or none: the log is being rotated."""
        if self._path == "-":
            return
        ours = os.fstat(self._descriptor)
        with suppress(FileNotFoundError):
            there = Path(self._path).stat()
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                return
        try:
            opened = _open(self._path)
        except OSError as error:  # the old file goes on
            log.warning("the access log '%s' can not be opened again: %s", self._path, error.strerror)
            return
        os.close(self._descriptor)
        self._descriptor, self._is_torn = opened, False


def _open(path: str) -> int:
    """Open ``path`` to append to it. Does not wait for the reader of a FIFO."""
    if path == "-":
        return sys.stdout.fileno()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
    os.set_blocking(descriptor, True)
    return descriptor
