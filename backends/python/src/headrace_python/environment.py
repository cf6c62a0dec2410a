"""Finds or creates the environment in a model's config: ``EXECUTION_ENV_PATH`` (docs/spec/behaviours.md section 9.6).

It names a directory with a conda or a virtual environment, an archive of one (conda-pack), or a
``requirements.txt``. No shell is used: this module sets the variables of ``bin/activate``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from headrace import LoadError, ending
from headrace_python.archive import unpack
from headrace_python.cache import cached
from headrace_python.program import run
from headrace_python.requirements import install

log = logging.getLogger("headrace.python")

#: The packages that every interpreter imports from the server's installation. They need only NumPy.
PACKAGES = ("headrace", "headrace_engines", "headrace_python", "triton_python_backend_utils", "c_python_backend_utils")
#: Stands for the model's directory at the start of the path.
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_UNPACK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter, and the variables to add to the server's for it. The default is the server's own."""

    python: str = sys.executable
    environ: Mapping[str, str] = field(default_factory=dict)


def find(setting: str, model: Path, is_sent: bool = False) -> Environment:
    """Return the environment ``setting`` of the model in the directory ``model``.

    If ``is_sent``, the setting came with a load request and must be inside that directory. Creates the environment if
    needed, which may take minutes: only for a loading thread. Raises `LoadError`, which never has the content of a
    file, because callers may get it; the log has the content.
    """
    if not setting:
        return Environment()
    path = _path(setting, model, is_sent)
    root = _root(path, model.resolve())
    if not (root / "bin/activate").exists() and not (root / "conda-meta").is_dir():
        raise LoadError(
            f"Path {root / 'bin/activate'} does not exist. The Python environment should contain an 'activate' script."
        )
    python = root / "bin/python"
    if not python.is_file():
        raise LoadError(f"Python environment '{root}' has no bin/python")
    found = Environment(str(python), _activated(root))
    check(str(python), python.stat().st_mtime_ns, tuple(found.environ.items()))
    return found


def _path(setting: str, model: Path, is_sent: bool) -> Path:
    whole = f"{model}{setting.removeprefix(MODEL_DIRECTORY)}" if setting.startswith(MODEL_DIRECTORY) else setting
    if is_sent and not _is_below(whole, model):  # before anything is read there
        raise LoadError(
            f"EXECUTION_ENV_PATH of a config that comes with a load request must lie in the model's directory "
            f"({MODEL_DIRECTORY}), found '{setting}'"
        )
    try:
        return Path(whole).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise LoadError(f"Failed to get the canonical path for {whole}.") from error


def _is_below(path: str, model: Path) -> bool:
    """True if ``path`` is in ``model``, as written and after following links."""
    if "\0" in path or not Path(os.path.normpath(path)).is_relative_to(model):
        return False
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(model))


def _root(path: Path, model: Path) -> Path:
    """Return the directory of the environment at ``path``."""
    if path.is_dir():
        return path
    if not path.is_file() or not os.access(path, os.R_OK):
        raise LoadError(f"Python environment '{path}' is no directory and no file that can be read")
    if path.suffix == ".txt":
        return install(path, model)
    found = path.stat()
    digest = hashlib.sha256(f"{path} {found.st_mtime_ns} {found.st_size}".encode())
    return cached(f"archive-{digest.hexdigest()[:32]}", partial(_unpack, path))


def _unpack(archive: Path, into: Path) -> None:
    log.info("unpacking the environment '%s'; this is done once", archive)
    unpack(archive, into)
    script = into / "bin/conda-unpack"
    if script.is_file():
        _set_prefix(archive, into, script)
    log.info("unpacked the environment '%s'", archive)


def _set_prefix(archive: Path, into: Path, script: Path) -> None:
    """Run conda-unpack, which writes the new path into the scripts."""
    argv = [str(into / "bin/python"), str(script)]
    with tempfile.TemporaryFile() as output:
        try:
            code = run(argv, _UNPACK_TIMEOUT_S, environ=_activated(into), output=output.fileno())
        except TimeoutError:
            raise LoadError(f"conda-unpack of environment '{archive}' takes too long") from None
        except OSError as error:
            raise LoadError(f"environment '{archive}' has no bin/python that runs: {error.strerror}") from error
        output.seek(0)
        text = output.read(4096).decode(errors="backslashreplace").strip()
    if code != 0:
        log.error("conda-unpack of environment '%s' %s:\n%s", archive, ending(code), text)
        raise LoadError(f"conda-unpack of environment '{archive}' {ending(code)}; its output is in the server's log")


def _activated(root: Path) -> Mapping[str, str]:
    """Return the variables that ``bin/activate`` sets, and those that Triton adds."""
    kind = "VIRTUAL_ENV" if (root / "pyvenv.cfg").exists() else "CONDA_PREFIX"
    return {
        kind: str(root),
        "PATH": _before(root / "bin", "PATH"),
        "LD_LIBRARY_PATH": _before(root / "lib", "LD_LIBRARY_PATH"),
        "PYTHONHOME": "",
    }


def _before(folder: Path, variable: str) -> str:
    """Return ``variable`` with ``folder`` in front. An empty entry would be the current directory, so there is none."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get(variable))))


OLDEST = (3, 10)
_TIMEOUT_S = 60.0

#: Runs in any Python, however old.
_PROBE = """
import json, sys
found = {"version": list(sys.version_info[:2])}
try:
    import numpy
except Exception as error:
    found["error"] = "%s: %s" % (type(error).__name__, error)
print("\\n" + json.dumps(found))
"""


@lru_cache(maxsize=256)
def check(python: str, changed_ns: int, environ: tuple[tuple[str, str], ...]) -> None:
    """Raise `LoadError` unless the interpreter runs, is new enough and has NumPy."""
    with tempfile.TemporaryFile() as output:
        try:
            code = run([python, "-c", _PROBE], _TIMEOUT_S, environ=dict(environ), output=output.fileno())
        except TimeoutError:
            raise LoadError(f"'{python}' did not answer within {_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise LoadError(f"'{python}' cannot be run: {error.strerror}") from error
        output.seek(0)
        text = output.read(1 << 16).decode(errors="backslashreplace").strip()
    try:
        found = json.loads(text.rpartition("\n")[2])
    except ValueError:
        log.error("'%s' is no Python that runs: it %s\n%s", python, ending(code), text[-2000:])
        raise LoadError(f"'{python}' is no Python that runs: it {ending(code)}") from None
    if tuple(found["version"]) < OLDEST:
        version, oldest = (".".join(map(str, each)) for each in (found["version"], OLDEST))
        raise LoadError(f"environment of '{python}' has Python {version}; Headrace needs {oldest} or newer")
    if "error" in found:
        raise LoadError(f"environment of '{python}' cannot import numpy, which models need: {found['error']}")
