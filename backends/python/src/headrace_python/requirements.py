"""Creates an environment from a ``requirements.txt``, and keeps it until the file changes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from headrace import LoadError, ending, read_regular
from headrace_python.cache import cached
from headrace_python.program import run

log = logging.getLogger("headrace.python")

#: The limit of each step. pip has its own limit for retries.
INSTALL_TIMEOUT_S = 1800.0
#: The most bytes of pip's last output in the log.
TAIL_BYTES = 4096

#: pip accepts abbreviated options, and several on a line.
_INCLUDE = re.compile(r"(?:^|\s)(?:-[rc]\s*|--(?:requirem|cons)\w*(?:\s*=\s*|\s+))(\S+)")
_COMMENT = re.compile(r"(?:^|\s)#.*$")


def install(file: Path, model: Path) -> Path:
    """Return an environment with the packages of ``file``, and NumPy, on the server's Python.

    It is created once for the text of ``file`` and of the files that it includes. Changes of other files that they
    name, such as a wheel, are not noticed. ``model`` is the model's directory. Raises `LoadError`.
    """
    room = model if file.is_relative_to(model) else file.parent
    digest = hashlib.sha256(f"{sys.version} {sys.base_prefix}".encode())
    for path in _files(file, room, []):
        digest.update(read_regular(path))
    return cached(f"requirements-{digest.hexdigest()[:32]}", lambda into: _make(into, file))


def _files(file: Path, room: Path, seen: list[Path]) -> Iterator[Path]:
    """Yield ``file`` and the files that it includes, each once. Raises `LoadError` for one outside ``room``."""
    if file in seen:
        return
    seen.append(file)
    yield file
    for number, line in enumerate(_lines(read_regular(file).decode("utf-8-sig", "replace")), 1):
        for name in _INCLUDE.findall(line):
            yield from _files(_included(file, number, name.strip("\"'"), room), room, seen)


def _lines(text: str) -> Iterator[str]:
    """Yield logical lines as pip reads them: a backslash continues a line, unless it is a comment."""
    begun = ""
    for line in text.splitlines():
        if line.endswith("\\") and not _COMMENT.match(line):
            begun += line.strip("\\")
        else:
            yield _COMMENT.sub("", f"{begun} {line}" if _COMMENT.match(line) else begun + line)
            begun = ""
    yield _COMMENT.sub("", begun)


def _included(file: Path, number: int, name: str, room: Path) -> Path:
    """Return the path of ``name``. The content of line ``number`` is only logged: a caller may get the error."""
    path = (file.parent / name).resolve()
    if not path.is_relative_to(room):
        log.error("'%s' includes '%s', which is outside the directory '%s'", file, name, room)
        raise LoadError(f"requirement {number} of '{file}' includes a file outside the directory '{room}'")
    if not path.is_file():
        log.error("'%s' includes '%s', which is no file", file, name)
        raise LoadError(f"requirement {number} of '{file}' includes a path that is no file")
    return path


def _make(into: Path, file: Path) -> None:
    log.info("making the environment of '%s'; this is done once", file)
    python = str(into / "bin/python")
    environ = {"PYTHONHOME": "", "VIRTUAL_ENV": str(into)}
    pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    with tempfile.TemporaryFile() as output:
        installing = _Installing(file, environ, output)
        installing.do([sys.executable, "-m", "venv", str(into)], "venv")
        installing.do([*pip, "-r", str(file)], "pip")
        if run([python, "-c", "import numpy"], 60.0, environ=environ, output=output.fileno()) != 0:
            installing.do([*pip, "numpy"], "pip")
    log.info("made the environment of '%s'", file)


class _Installing:
    """Runs one program after the other, and logs its progress."""

    def __init__(self, file: Path, environ: dict[str, str], output: IO[bytes]) -> None:
        self._file, self._environ, self._output = file, environ, output

    def do(self, argv: list[str], name: str) -> None:
        """Run ``argv``. Raises `LoadError` if it fails. Its last output may quote the file, so only the log has it."""
        try:
            code = run(
                argv,
                INSTALL_TIMEOUT_S,
                environ=self._environ,
                output=self._output.fileno(),
                cwd=self._file.parent,
                on_progress=self._log_progress,
            )
        except TimeoutError:
            self._fail(f"{name} did not end within {INSTALL_TIMEOUT_S:g} s")
        if code != 0:
            self._fail(f"{name} {ending(code)}")

    def _fail(self, reason: str) -> None:
        log.error("the environment of '%s' cannot be made: %s\n%s", self._file, reason, self._tail())
        raise LoadError(f"the environment of '{self._file}' cannot be made: {reason}; its last words are in the log")

    def _log_progress(self, passed_s: float) -> None:
        last = self._tail().rpartition("\n")[2]
        log.info("still making the environment of '%s' after %d s: %s", self._file, passed_s, last[:200])

    def _tail(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), TAIL_BYTES, max(size - TAIL_BYTES, 0))
        return tail.decode(errors="backslashreplace").strip()
