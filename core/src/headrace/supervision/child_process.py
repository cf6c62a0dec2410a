"""A child process, as its parent holds it: started, waited for, killed with all that it has started."""

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

from headrace.supervision import bootstrap
from headrace.supervision.orphan_reaper import ORPHAN_REAPER


@dataclass(slots=True)
class ChildProcess:
    """A running child, which the `ORPHAN_REAPER` watches. ``crash_file`` is a file in which its fatal errors leave
    their traceback; the packages of the server are in ``folders``, each with its final slash."""

    process: subprocess.Popen[bytes]
    crash_file: IO[bytes]
    folders: Sequence[str]
    _reaping: threading.Lock = field(default_factory=threading.Lock, init=False)

    def wait(self) -> int:
        """The exit code; whatever else the child's process group still runs is killed before."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        with self._reaping:
            code = self.process.wait()
        ORPHAN_REAPER.forget(self.process.pid)
        return code

    def kill(self) -> None:
        """End the child and all that it has started. Nothing once it is reaped: its number may be another's."""
        with self._reaping, contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)


def run_child(command: Sequence[str], fds: Iterable[int], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The process, in a session of its own, which inherits ``fds`` and has ``environ`` besides the server's.

    Raises `OSError` if it cannot be run, and `ValueError` for a NUL in a name.
    """
    return subprocess.Popen(
        command,
        pass_fds=tuple(fds),
        stdin=None if sys.stdin is not None else subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
        start_new_session=True,
    )


def child_command(python: str, entry: str, name: str, packages: Iterable[str], **arguments: Any) -> list[str]:
    """The command line with which the interpreter ``python`` calls ``entry``, ``module:function``, with ``arguments``
    as keywords. ``name`` is what ``ps`` shows. ``packages`` are those of this installation that another needs."""
    packed = {"packages": {} if python == sys.executable else _folders_of(packages)}
    return [python, str(bootstrap.__file__), name, json.dumps({"entry": entry, **arguments, **packed})]


def folders_of(packages: Iterable[str]) -> Sequence[str]:
    """The folders of ``packages`` of this installation, each with its final slash."""
    return [f"{folder}/{package}/" for package, folder in _folders_of(packages).items()]


def _folders_of(packages: Iterable[str]) -> Mapping[str, str]:
    """The folder of this installation in which each package lies; a name that is no package here is left out."""
    specs = ((package, importlib.util.find_spec(package)) for package in packages)
    return {name: str(Path(spec.origin).parents[1]) for name, spec in specs if spec is not None and spec.origin}
