"""Where the lines of the log go, and what models print with them.

`LogOutput` writes records to a descriptor at once, which may fail. Threads and processes of a model say once for
which one they `speak_for`. In JSON, what is printed becomes records, too (`record_prints`): a line in between that is
no record, or a record glued to a print without a newline, is what no reader of the log can use. That replaces
``sys.stdout`` and ``sys.stderr`` of the process, in the server and in its children; what native libraries and other
programs write to the descriptors themselves passes by. In the text formats what is printed stays as it is, as with
Triton.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, ClassVar

_local = threading.local()
#: Of every thread, in a process that has one model only.
_of_process = ""


def speak_for(model: str) -> None:
    """What this thread says from now on, it says for ``model``."""
    _local.model = model


def speak_for_nobody() -> None:
    """What this thread says from now on, it says for itself again."""
    _local.__dict__.pop("model", None)


def speak_for_all(model: str) -> None:
    """What this process says from now on, it says for ``model``, unless one of its threads has said otherwise."""
    global _of_process
    _of_process = model


def speaker() -> str:
    """The model for which this thread speaks; empty if it is none."""
    model: str = getattr(_local, "model", _of_process)
    return model


#: A reader of the log that has stopped reading holds the server up so long for one line.
_PATIENCE_MS = 1000


class LogOutput(logging.Handler):
    """Writes each record as one line into the file ``path``, or to standard error if that is empty.

    A line that cannot be written is lost, and nobody is disturbed: neither who logs nor the exit of
    the process. The first that goes through again says how many were lost, and why; ``lost`` counts those of
    all outputs of the process. Raises OSError if the file cannot be opened.
    """

    lost: ClassVar[int] = 0

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
            LogOutput.lost += 1  # under the lock of this handler: a process has one log

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


#: A line without an end is cut here.
_LINE_BYTES = 16 * 1024

_installed = 0


def prints_are_records() -> bool:
    """Whether what this process prints becomes records; then its children's prints should, too."""
    return _installed > 0


def record_prints() -> Callable[[], None]:
    """From now on, what this process prints is written as records to where it would have gone.

    Returns what puts the streams back. Streams without a descriptor, as notebooks have, stay.
    """
    global _installed
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _replaced(sys.stdout, "stdout"), _replaced(sys.stderr, "stderr")
    _installed += 1

    def undo() -> None:
        global _installed
        flush_prints()
        sys.stdout, sys.stderr = before
        _installed -= 1

    return undo


def flush_prints() -> None:
    """Write what this thread has printed without a newline."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class Records(io.RawIOBase):
    """Takes the bytes of a stream, and writes each line as one record to ``descriptor``.

    Threads do not mix: each has a line of its own. An explicit flush ends it, and so do `_LINE_BYTES`.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self._begun = threading.local()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        taken = bytes(data)
        line: bytes = getattr(self._begun, "line", b"") + taken
        while (end := line.find(b"\n")) >= 0 or len(line) >= _LINE_BYTES:
            cut = end if 0 <= end < _LINE_BYTES else _LINE_BYTES
            self._emit(line[:cut])
            line = line[cut + (cut == end) :]
        self._begun.line = line
        return len(taken)

    def flush(self) -> None:
        line: bytes = getattr(self._begun, "line", b"")
        if line:
            self._begun.line = b""
            self._emit(line)

    def _emit(self, line: bytes) -> None:
        fields = {
            "time": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            "level": "INFO",
            "message": line.removesuffix(b"\r").decode(errors="backslashreplace"),
            "logger": self._name,
            "process": os.getpid(),
            "thread": threading.current_thread().name,
        }
        if model := speaker():
            fields["model"] = model
        record = memoryview(json.dumps(fields).encode() + b"\n")
        with contextlib.suppress(OSError):  # nobody reads: what a model prints is not worth a model
            while record:
                record = record[os.write(self._descriptor, record) :]


def _replaced(stream: Any, name: str) -> Any:
    try:
        descriptor = stream.fileno()
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return stream
    records: Any = Records(name, descriptor)
    return io.TextIOWrapper(records, encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True)
