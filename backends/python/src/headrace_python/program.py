"""A program that runs for a while beside the server: no shell, no orphan, no wait without end."""

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

#: The interval at which a waiting load logs that the program still runs.
TELL_S = 10.0
#: The poll interval for a program that has not started: while its children live, its end is no event on the pipe.
_LOOK_S = 0.2


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
    tell: Callable[[float], None] | None = None,
    started: int | None = None,
    start_timeout_s: float = 0.0,
) -> int:
    """Return the exit code of ``argv``, negative for the signal that ended it.

    It runs in a process group of its own, which is dead when this returns or raises, and also when
    the server has been killed meanwhile. ``environ`` is added to the server's variables.
    ``output`` is a descriptor for both its outputs, or else they are the server's stderr. ``tell``
    is called with the seconds passed, every `TELL_S`. With ``started``, the reading end of a pipe to which it writes,
    the time counts from there, for which it has ``start_timeout_s``. Raises TimeoutError, `StartTimeout` in the latter
    case, and OSError if it cannot be started.
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
    # Ends with the process, without reaping it: until then its pid is not reused.
    ended = threading.Thread(target=os.waitid, args=(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT), daemon=True)
    ended.start()
    try:
        if started is not None:
            _await_start(ended, started, start_timeout_s)
        _wait(ended, timeout_s, tell)
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
    while ended.is_alive() and not start.poll(_LOOK_S * 1000):
        if time.monotonic() - begun > timeout_s:
            raise StartTimeout


def _wait(ended: threading.Thread, timeout_s: float, tell: Callable[[float], None] | None) -> None:
    begun = time.monotonic()
    while ended.is_alive():
        left = begun + timeout_s - time.monotonic()
        if left <= 0:
            raise TimeoutError
        ended.join(min(left, TELL_S))
        if tell is not None and ended.is_alive():
            tell(time.monotonic() - begun)
