"""Runs a program beside the server with a time limit, without a shell, and kills it with the server."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace import ORPHAN_REAPER

#: The interval of calls to ``on_progress``.
PROGRESS_S = 10.0
#: The poll interval for a program that has not started: its exit is no event on the pipe while its children run.
_POLL_S = 0.2


class StartTimeout(TimeoutError):
    """The program has not started in time."""


def run(
    argv: Sequence[str],
    timeout_s: float,
    *,
    environ: Mapping[str, str] | None = None,
    output: int | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    on_progress: Callable[[float], None] | None = None,
    started: int | None = None,
    start_timeout_s: float = 0.0,
) -> int:
    """Return the exit code of ``argv``, negative for the signal that ended it.

    It runs in a new process group, which is killed before this returns or raises, and when the server is killed.

    - ``environ`` is added to the server's variables.
    - ``output`` is a descriptor for stdout and stderr; by default, the server's stderr.
    - ``on_progress`` is called with the seconds passed, every `PROGRESS_S`.
    - ``started`` is the reading end of a pipe to which the program writes when it has started, for which it has
      ``start_timeout_s``. ``timeout_s`` counts from there.

    Raises TimeoutError, `StartTimeout` for the start, and OSError if the program cannot be started.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=2 if output is None else output,
        stderr=output,
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        pass_fds=pass_fds,
        start_new_session=True,
    )
    ORPHAN_REAPER.watch(process.pid)
    # Waits for the process without reaping it, so that its pid is not reused before it is killed.
    ended = threading.Thread(target=os.waitid, args=(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT), daemon=True)
    ended.start()
    try:
        if started is not None:
            _await_start(ended, started, start_timeout_s)
        _wait(ended, timeout_s, on_progress)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        ended.join()
        code = process.wait()
        ORPHAN_REAPER.forget(process.pid)
    return code


def _await_start(ended: threading.Thread, started: int, timeout_s: float) -> None:
    begun = time.monotonic()
    start = select.poll()  # select() takes no descriptor above 1023
    start.register(started, select.POLLIN)
    while ended.is_alive() and not start.poll(_POLL_S * 1000):
        if time.monotonic() - begun > timeout_s:
            raise StartTimeout


def _wait(ended: threading.Thread, timeout_s: float, on_progress: Callable[[float], None] | None) -> None:
    begun = time.monotonic()
    while ended.is_alive():
        left = begun + timeout_s - time.monotonic()
        if left <= 0:
            raise TimeoutError
        ended.join(min(left, PROGRESS_S))
        if on_progress is not None and ended.is_alive():
            on_progress(time.monotonic() - begun)
