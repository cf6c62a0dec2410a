"""Writes log lines, and turns what models print into log records.

`LogOutput` writes each record to a file descriptor at once; a write may fail. Threads and processes that run a model
declare its name once (`set_thread_model`), and JSON records then have a field with it.

In the JSON format, printed lines become records, too (`record_prints`): a reader of the log could not parse other
lines. This replaces ``sys.stdout`` and ``sys.stderr``, in the server and in model processes. Output that native
libraries or other programs write directly to the descriptors is not changed. In the text formats printed lines stay as
they are, as in Triton.
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
#: The model of all threads, in a process that runs one model.
_process_model = ""


def set_thread_model(model: str) -> None:
    """Set the model in the JSON records that this thread logs or prints from now on."""
    _local.model = model


def clear_thread_model() -> None:
    """Undo `set_thread_model` for this thread."""
    _local.__dict__.pop("model", None)


def set_process_model(model: str) -> None:
    """Like `set_thread_model`, for all threads of this process that have not called `set_thread_model`."""
    global _process_model
    _process_model = model


def current_model() -> str:
    """Return the model that this thread runs; empty if it runs none."""
    model: str = getattr(_local, "model", _process_model)
    return model


#: If the reader of the log stops reading, one line blocks the server for this long at most.
_WRITE_TIMEOUT_MS = 1000


class LogOutput(logging.Handler):
    """Writes each record as one line to the file ``path``, or to standard error if ``path`` is empty.

    A line that cannot be written is lost: the caller gets no error, and the process exits normally. The next line that
    can be written is preceded by one with the number of lost lines and the reason. ``lost`` counts the lost lines of
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
        """Write the reason instead of a record that cannot be formatted. The caller gets no error."""
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
        """Write ``line``; return true if all of it was written. If the line before was cut off, end that one first."""
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
            except BlockingIOError:  # another program has made the shared terminal non-blocking
                if not _is_writable(self._descriptor):
                    raise
                continue
            self._is_torn = written < len(data)
            data = data[written:]


def _standard_error() -> int:
    """Return the file descriptor of standard error; -1 if it has none, as in notebooks."""
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
    return bool(poll.poll(_WRITE_TIMEOUT_MS))


#: Longer printed lines are cut into records of this size.
_LINE_BYTES = 16 * 1024

_installed = 0


def prints_are_records() -> bool:
    """True if printed lines become records in this process. Then they must in its children, too."""
    return _installed > 0


def record_prints() -> Callable[[], None]:
    """Write all output of this process as JSON records, to the same descriptors, from now on.

    Returns a function that restores the streams. Streams without a descriptor, as in notebooks, are not replaced.
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
    """Write the incomplete lines that this thread has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class Records(io.RawIOBase):
    """A raw stream that writes each line as one JSON record to ``descriptor``.

    Each thread has its own line, so the output of threads does not mix. A line ends by a newline, an explicit flush, or
    16 KiB.
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
        content = bytes(data)
        line: bytes = getattr(self._begun, "line", b"") + content
        while (end := line.find(b"\n")) >= 0 or len(line) >= _LINE_BYTES:
            cut = end if 0 <= end < _LINE_BYTES else _LINE_BYTES
            self._emit(line[:cut])
            line = line[cut + (cut == end) :]
        self._begun.line = line
        return len(content)

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
        if model := current_model():
            fields["model"] = model
        record = memoryview(json.dumps(fields).encode() + b"\n")
        with contextlib.suppress(OSError):  # no reader: a failed print must not fail the model
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
