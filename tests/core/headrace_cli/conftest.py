"""Real processes of the command line."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import COMPLAINT

CONFIG = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }
"""
_HERE = ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
#: No fixed port: tests run side by side.
FREE_PORTS = [*_HERE, "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
DEADLINE_S = 90


class Process:
    """A running ``headrace``, whose stderr is read line by line with a deadline."""

    def __init__(self, *words: str, environ: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "headrace_cli", *words]
        self.popen = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})}
        )
        self.seen: list[str] = []
        self._complaints: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line of stderr, from here on, that ``pattern`` finds."""
        while (line := self._next()) is not None:
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line matches {pattern!r}:\n{''.join(self.seen)}")

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def finish(self) -> tuple[int, str]:
        """The exit code, and all of stderr."""
        code = self.popen.wait(DEADLINE_S)
        while self._next() is not None:
            pass
        return code, "".join(self.seen)

    def close(self) -> None:
        """Restore logging, and fail if stderr has a warning of asyncio or the interpreter."""
        self.popen.kill()
        self.popen.wait()
        self._reader.join()
        for pipe in (self.popen.stdout, self.popen.stderr):
            assert pipe is not None
            pipe.close()
        assert not self._complaints, self._complaints

    def _next(self) -> str | None:
        """The next line; None at the end."""
        try:
            line = self._lines.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise AssertionError(f"no further line in {DEADLINE_S} s:\n{''.join(self.seen)}") from None
        if line is not None:
            self.seen.append(line)
        return line

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._lines.put(line)
            if COMPLAINT.search(line):
                self._complaints.append(line)
        self._lines.put(None)


@pytest.fixture
def headrace() -> Iterator[Callable[..., Process]]:
    """Starts ``headrace`` with the given words; whatever still runs at the end is killed."""
    started: list[Process] = []

    def start(*words: str, environ: dict[str, str] | None = None) -> Process:
        started.append(Process(*words, environ=environ))
        return started[-1]

    yield start
    with contextlib.ExitStack() as stack:
        for process in started:
            stack.callback(process.close)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model, ``echo``, of the identity backend."""
    root = tmp_path / "models"
    (root / "echo" / "1").mkdir(parents=True)
    (root / "echo" / "config.pbtxt").write_text(CONFIG)
    return root


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path of the processes that are started."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return folder


@pytest.fixture
def distribute(site: Path) -> Callable[[str, str], None]:
    """Installs a distribution ``headrace-<name>`` 1.5 with one plugin, as pip would lay it out."""

    def install(name: str, source: str) -> None:
        (site / f"plugin_{name}.py").write_text(source)
        info = site / f"headrace_{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headrace-{name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[headrace]\n{name} = plugin_{name}\n")

    return install


@pytest.fixture
def serve(headrace: Callable[..., Process], repository: Path) -> Callable[..., Process]:
    """Starts ``headrace serve`` on ``repository`` and on free ports."""

    def start(*words: str, environ: dict[str, str] | None = None) -> Process:
        return headrace("serve", f"--model-repository={repository}", *FREE_PORTS, *words, environ=environ)

    return start
