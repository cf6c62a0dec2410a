"""A process that does one job within limits of time and memory, so that a bad input harms no model.

The parent has a `BoundedProcess`. The program of the child calls `serve_job`. Both send frames: 8 bytes with the size,
and the bytes.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Final
from weakref import finalize

from headrace import BackendError

_START_S: Final = 60.0
_HEADER_BYTES: Final = 8


class BoundedProcess:
    """Runs ``python -m program`` and sends it inputs, one at a time. Any thread.

    It starts with the first input. If it exits or is late, it is killed, and the next input starts it again. It ends
    with `close`, or with the last reference to this object. ``limit_bytes`` is the memory that jobs may use, beyond the
    program's memory before the first job.
    """

    def __init__(self, program: str, limit_bytes: int) -> None:
        self._command = [sys.executable, "-m", program, str(limit_bytes)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: finalize[..., Any] | None = None

    def ask(self, given: bytes, limit_s: float) -> bytes | None:
        """Return the job's result for ``given``; None if the job exceeds ``limit_s`` or the memory.

        Blocks, for at most ``limit_s`` and a start. Raises `BackendError` if the process cannot start.
        """
        with self._lock:
            process = self._process or self._start()
            answer = _read(process, limit_s) if _write(process, given) else None
            if answer is None:
                self._end()
            return answer

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process, self._finalizer = process, finalize(self, _stop, process)
        if _read(process, _START_S) is None:
            self._end()
            raise BackendError(f"the process '{' '.join(self._command)}' cannot start")
        return process

    def _end(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


def serve_job(job: Callable[[bytes], bytes]) -> None:
    """Answer each input with ``job`` until there are no more: the program of a `BoundedProcess`.

    An exception of ``job`` ends the process. Imports of the program before this call are not limited.
    """
    import resource  # not on Windows

    limit = _data_bytes(resource.getpagesize()) + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given, made = sys.stdin.buffer, sys.stdout.buffer
    answer = b""  # it is ready
    while True:
        made.write(len(answer).to_bytes(_HEADER_BYTES, "little") + answer)
        made.flush()
        header = given.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES:
            return
        answer = job(given.read(int.from_bytes(header, "little")))


def _data_bytes(page_bytes: int) -> int:
    """Return the memory of this process that its limit counts: each thread of a library has 8 MiB; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * page_bytes
    except OSError:  # not Linux
        return 0


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _write(process: subprocess.Popen[bytes], given: bytes) -> bool:
    """Send ``given``. Return False if ``process`` has exited."""
    assert process.stdin is not None
    try:
        process.stdin.write(len(given).to_bytes(_HEADER_BYTES, "little") + given)
        process.stdin.flush()
    except OSError:
        return False
    return True


def _read(process: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
    """Return the next frame of ``process``; None if it exits or is late."""
    assert process.stdout is not None
    fd, end_s = process.stdout.fileno(), monotonic() + limit_s
    header = _read_bytes(fd, _HEADER_BYTES, end_s)
    return None if header is None else _read_bytes(fd, int.from_bytes(header, "little"), end_s)


def _read_bytes(fd: int, size: int, end_s: float) -> bytes | None:
    poll = select.poll()  # `select.select` reads no descriptor above 1023
    poll.register(fd, select.POLLIN)
    read = bytearray()
    while len(read) < size:
        if not poll.poll(max(0.0, end_s - monotonic()) * 1000):
            return None
        part = os.read(fd, min(size - len(read), 1 << 20))
        if not part:
            return None
        read += part
    return bytes(read)
