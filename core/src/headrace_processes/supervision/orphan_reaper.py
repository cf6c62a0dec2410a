"""Kills the children of a server that has died, so that no process outlives it.

Run as a program, it reads ``+group`` and ``-group`` lines. At the end of its input it kills every process group that
is still registered. It is needed because a child that hangs inside an engine, and the processes that a model has
forked, do not detect that the server has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


class OrphanReaper:
    """The reaper of this process. It is started with the first child. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        """Register ``group``, to be killed when this process dies."""
        self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Unregister ``group``: it has exited, and its number may be reused."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self._process is None:
                self._process = _start()
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


#: All servers of this process share it.
ORPHAN_REAPER = OrphanReaper()


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        groups.add(group) if change == "+" else groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
