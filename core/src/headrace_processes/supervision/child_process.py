"""A child process, in its parent: start it, wait for it, and kill it with all processes that it has started."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from headrace_processes.supervision import bootstrap
from headrace_processes.supervision.orphan_reaper import ORPHAN_REAPER

#: The packages that every child imports from this installation.
_OURS = ("headrace", "headrace_engines", "headrace_processes")


@dataclass(slots=True)
class ChildProcess:
    """A running child that the `ORPHAN_REAPER` watches. The traceback of a fatal error is written to ``crash_file``.
    ``folders`` are the folders of the server's packages, each with a final slash."""

    process: subprocess.Popen[bytes]
    crash_file: IO[bytes]
    folders: Sequence[str]
    _reaping: threading.Lock = field(default_factory=threading.Lock, init=False)

    def wait(self) -> int:
        """Wait until the child exits, kill the rest of its process group, and return its exit code, negative for a
        signal."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        with self._reaping:
            code = self.process.wait()
        ORPHAN_REAPER.forget(self.process.pid)
        return code

    def kill(self) -> None:
        """Kill the child and its process group. Do nothing once it is reaped: its number may be reused."""
        with self._reaping, contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)


def run_child(command: Sequence[str], fds: Iterable[int], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in its own session and return it. It inherits ``fds``; ``environ`` is added to its environment.

    Raises `OSError` if it cannot be started, and `ValueError` for a NUL character in a name.
    """
    return subprocess.Popen(
        command,
        pass_fds=tuple(fds),
        stdin=None if sys.stdin is not None else subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
        start_new_session=True,
    )


def child_command(python: str, entry: str, name: str, packages: Iterable[str], **arguments: Any) -> list[str]:
    """Return the command line with which the interpreter ``python`` calls ``entry``, a ``module:function``, with the
    keyword ``arguments``. ``ps`` shows ``name``. If ``python`` is another interpreter than this one, it imports
    Headrace and ``packages`` from this installation."""
    folders = {"packages": {} if python == sys.executable else _folders_of(packages)}
    return [python, str(bootstrap.__file__), name, json.dumps({"entry": entry, **arguments, **folders})]


def folders_of(packages: Iterable[str]) -> Sequence[str]:
    """Return the folders of Headrace's packages and of ``packages`` in this installation, each with a final slash."""
    return [f"{folder}/{package}/" for package, folder in _folders_of(packages).items()]


def _folders_of(packages: Iterable[str]) -> Mapping[str, str]:
    """Return the folder that contains each package of this installation, Headrace's included.

    Names that are no packages are omitted.
    """
    names = dict.fromkeys((*_OURS, *packages))
    specs = ((package, importlib.util.find_spec(package)) for package in names)
    return {name: str(Path(spec.origin).parents[1]) for name, spec in specs if spec is not None and spec.origin}
