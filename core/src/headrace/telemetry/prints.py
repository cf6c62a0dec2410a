"""What models and plugins print, as records of a JSON log: each line is one, with the model that printed it.

In the text formats what is printed stays as it is, as with Triton. In JSON, a line in between that is
no record, or a record glued to a print without a newline, is what no reader of the log can use.
Replaces ``sys.stdout`` and ``sys.stderr`` of the process, in the server and in its children; what
native libraries and other programs write to the descriptors themselves passes by.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from headrace.telemetry.speaker import speaker

#: A line without an end is cut here.
_LINE_BYTES = 16 * 1024

_installed = 0


def are_records() -> bool:
    """Whether what this process prints becomes records; then its children's prints should, too."""
    return _installed > 0


def install() -> Callable[[], None]:
    """From now on, what this process prints is written as records to where it would have gone.

    Returns what puts the streams back. Streams without a descriptor, as notebooks have, stay.
    """
    global _installed
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _replaced(sys.stdout, "stdout"), _replaced(sys.stderr, "stderr")
    _installed += 1

    def undo() -> None:
        global _installed
        flush()
        sys.stdout, sys.stderr = before
        _installed -= 1

    return undo


def flush() -> None:
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
