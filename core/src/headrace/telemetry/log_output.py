"""Where the lines of the log go: a descriptor that is written to at once, and that may fail."""

from __future__ import annotations

import io
import logging
import os
import select
import sys

#: A reader of the log that has stopped reading holds the server up so long for one line.
_PATIENCE_MS = 1000


class LogOutput(logging.Handler):
    """Writes each record as one line into the file ``path``, or to standard error if that is empty.

    A line that cannot be written is lost, and nobody is disturbed: neither who logs nor the exit of
    the process. The first that goes through again says how many were lost, and why. Raises OSError
    if the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._is_own = bool(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666) if path else _standard_error()
        self._lost = 0
        self._why = ""
        self._is_torn = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        lost = self._lost
        if lost:
            note = logging.LogRecord(
                "headrace", logging.WARNING, __file__, 0, "%d records were lost: %s", (lost, self._why), None
            )
            line = f"{self.format(note)}\n{line}"
        if self._write(line):
            self._lost -= lost
        else:
            self._lost += 1

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A record that cannot be formatted is replaced by why: the one who logs is not to blame for the log."""
        why = sys.exc_info()[1]
        text = f"a record of {record.pathname}:{record.lineno} could not be formatted: {type(why).__name__}: {why}"
        note = logging.LogRecord("headrace", logging.ERROR, __file__, 0, "%s", (text,), None)
        self._write(self.format(note))

    def close(self) -> None:
        super().close()
        if self._is_own and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, line: str) -> bool:
        """Whether all of ``line`` was written. What was torn by a failure is ended before the next."""
        data = memoryview(f"{line}\n".encode("utf-8", "backslashreplace"))
        if self._descriptor < 0:
            return _write_text(line)
        try:
            if self._is_torn:
                self._write_all(memoryview(b"\n"))
                self._is_torn = False
            self._write_all(data)
        except OSError as error:
            self._why = str(error.strerror or error)
            return False
        return True

    def _write_all(self, data: memoryview) -> None:
        while data:
            try:
                written = os.write(self._descriptor, data)
            except BlockingIOError:  # somebody has made a shared terminal so
                if not _is_writable(self._descriptor):
                    raise
                continue
            self._is_torn = written < len(data)
            data = data[written:]


def _standard_error() -> int:
    """Its descriptor; -1 if it is none, as in notebooks."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, io.UnsupportedOperation):
        return -1


def _write_text(line: str) -> bool:
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _is_writable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(_PATIENCE_MS))
