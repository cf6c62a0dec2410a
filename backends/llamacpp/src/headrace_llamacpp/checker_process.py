"""A process that compiles grammars with limits of memory and time, so that a bad grammar harms no model.

It is ``python -m headrace_llamacpp.compile_grammars``. It starts with the first grammar, takes about 1 ms for each, and
exits when its pipe is closed. If it exits or takes too long, the grammar is refused, and the next one starts it again.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from typing import Final

from headrace import BackendError

#: The longest time to compile a grammar, in seconds, and the most memory for it, in bytes.
LIMIT_S = 2.0
LIMIT_BYTES: Final = 512 << 20


class GrammarChecker:
    """Sends grammars to the process. Any thread; one grammar at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def why_bad(self, grammar: str) -> str:
        """Return why ``grammar`` cannot be compiled; empty if it can. Blocks, for at most `LIMIT_S` and a start."""
        with self._lock:
            process = self._process or self._start()
            answer = _ask(process, grammar)
            if answer is None:
                self._end()
                return f"it takes more than {LIMIT_S:g} s or {LIMIT_BYTES >> 20} MiB to compile"
            return answer

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "headrace_llamacpp.compile_grammars", str(LIMIT_BYTES)]
        environ = {**os.environ, "RUST_BACKTRACE": "0"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
        )
        self._process = process
        assert process.stdout is not None
        if _read_line(process.stdout.fileno(), 60.0) is None:  # the limit does not include the start
            self._end()
            raise BackendError("the process that checks grammars cannot start: can Python import llguidance?")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate()


def _ask(process: subprocess.Popen[bytes], grammar: str) -> str | None:
    """Return the answer of ``process``; None if it dies or is late."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(grammar.encode("utf-8", "replace").hex().encode() + b"\n")
        process.stdin.flush()
    except OSError:
        return None
    line = _read_line(process.stdout.fileno(), LIMIT_S)
    return None if line is None else bytes.fromhex(line.decode()).decode("utf-8", "replace")


def _read_line(fd: int, limit_s: float) -> bytes | None:
    """Return the line that arrives within ``limit_s``; None if there is none."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([fd], [], [], limit_s)[0]:
            return None
        read = os.read(fd, 1 << 16)
        if not read:
            return None
        line += read
    return line.strip()
