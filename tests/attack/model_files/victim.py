"""A process that loads one mutant after the other (loader.py), and a look at what each does to it and around it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
#: A mutant that takes longer hangs. The machine may be busy.
HANGS_S = 30.0
#: For an engine that is imported first.
_BEGINS_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """The result of one mutant.

    - ``outcome``: ``refused``, ``answered``, ``failed``, ``crashed`` or ``hung``.
    - ``did``: a forbidden effect.
    - ``grown_bytes``: the largest growth of the process.
    """

    outcome: str
    said: str
    late_ms: float
    did: list[str]
    grown_bytes: int
    took_s: float


class Victim:
    """Loads models. ``folder`` is its own, and has the ``canary`` that no model may look at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._repository = folder / "repository"
        (self._repository / "m").mkdir(parents=True)
        self.canary = folder / "canary"
        self.canary.mkdir()
        for name in ("secret", "weights.bin"):
            (self.canary / name).write_bytes(bytes(4096))
        self._watch = _Watch(self.canary)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = (folder / "log").open("w+b")
        for name in ("home", "work", "temporary"):
            (folder / name).mkdir()

    @property
    def words(self) -> list[bytes]:
        """Return the names that an attacker tries."""
        mark = self.canary / "mark"
        return [
            str(self.canary / "secret").encode(),
            b"../../../canary/secret",
            b"../../../canary/weights.bin",
            b"/proc/self/environ",
            b"/dev/zero",
            f"__import__('os').system('touch {mark}')".encode(),
            b"cposix\nsystem\n",
            b"os.system",
            b"torch.save",
            b"*/_ORT_MEM_ADDR_/*",
            b"%s%s%n%n",
            b"A" * 70_000,
            b"\0",
            b"\xff\xfe",
            b"x",
            b"y",
        ]

    def close(self) -> None:
        self._end()
        self._log.close()
        self._watch.close()

    def load(self, config: str, files: Mapping[str, bytes]) -> Outcome:
        """Load a model with ``files`` in its version, and return the outcome."""
        version = self._repository / "m" / "1"
        (version.parent / "config.pbtxt").write_text(config)
        shutil.rmtree(version, ignore_errors=True)
        for name, content in files.items():
            (version / name).parent.mkdir(parents=True, exist_ok=True)
            (version / name).write_bytes(content)
        before = self._there()
        is_first = self._process is None
        process = self._begin()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        had, began = self._memory("VmRSS"), time.monotonic()
        process.stdin.write(b"\n")
        process.stdin.flush()
        said = self._hear(_BEGINS_S if is_first else HANGS_S)
        took_s = time.monotonic() - began
        grown = max(0, self._memory("VmHWM") - had) if said else 0
        if said is None:
            outcome: dict[str, Any] = self._ended(took_s)
        else:
            outcome = said
        did = [*outcome["did"], *(f"read {name}" for name in self._watch.seen())]
        did += [f"wrote {name}" for name in self._there() - before]
        return Outcome(outcome["outcome"], outcome["said"], outcome["late_ms"], did, grown, took_s)

    def _begin(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            home, temporary = str(self.folder / "home"), str(self.folder / "temporary")
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "loader.py"), str(self._repository)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=self.folder / "work",
                env={**os.environ, "HOME": home, "TMPDIR": temporary, "TF_CPP_MIN_LOG_LEVEL": "2",
                     "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        return self._process

    def _hear(self, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None if there is none in time, or the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _ended(self, took_s: float) -> dict[str, Any]:
        assert self._process is not None
        if took_s >= HANGS_S:
            self._process.send_signal(signal.SIGABRT)  # its stacks are written to the log
        code = self._process.wait(20)
        self._process.communicate()
        self._process = None
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")[-6000:]
        self._log.truncate()
        return {"outcome": "hung" if took_s >= HANGS_S else "crashed", "said": _told(code, log), "late_ms": 0.0,
                "did": []}  # fmt: skip

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _memory(self, name: str) -> int:
        assert self._process is not None
        with contextlib.suppress(OSError):
            found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
            return int(found[1]) * 1024 if found else 0
        return 0

    def _there(self) -> set[str]:
        """All files that anybody could have written here."""
        return {
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.name != "log" and "__pycache__" not in path.parts
        }


def _told(code: int, log: str) -> str:
    """Return how a process ended, and where, from its log."""
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = [line for line in log.splitlines() if re.search(r"terminate|what\(\)|Check|Fatal|File|free|corrupt", line)]
    return f"{how}: {' | '.join(lines[:12])}"


class _Watch:
    """Sees who opens, makes or changes files in a folder, by inotify."""

    _OPEN, _CREATE, _MODIFY = 0x20, 0x100, 0x2

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.inotify_init1(os.O_NONBLOCK)
        watched = libc.inotify_add_watch(self._file, bytes(folder), self._OPEN | self._CREATE | self._MODIFY)
        assert watched >= 0, os.strerror(ctypes.get_errno())

    def seen(self) -> list[str]:
        """The files since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self._file, 1 << 16):
                while content:
                    size = int.from_bytes(content[12:16], sys.byteorder)
                    found.append(content[16 : 16 + size].rstrip(b"\0").decode())
                    content = content[16 + size :]
        return sorted({name for name in found if name})

    def close(self) -> None:
        os.close(self._file)
