"""The files of one model: whether links keep inside, the labels of its outputs, and what a load may bring along.

Nothing of a model lies outside the model repository, unless ``--allow-external-links`` says that it may.
Whoever may write into one model's directory must not thereby read, and have served, what the
server's user can read elsewhere. Links that stay inside are everyday: a Kubernetes volume is made
of them (``config.pbtxt -> ..data/config.pbtxt``), and a repository may itself be a link.

A load may bring along another config, or all files of the model. These are written to private directories, gone when
the server is, even after SIGKILL: each process has a directory of its own below one per user, and holds a lock on it.
Whoever starts next removes the directories whose lock nobody holds any more.

Source: docs/spec/behaviours.md sections 3.4 and 5.4.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import posixpath
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.config_json import parse_json
from headrace.config.confinement import why_path_leaves
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.regular_files import read_regular, special_kind
from headrace.config.validation import Problem
from headrace.errors import HeadraceError, InvalidArgument, LoadError, Unsupported

log = logging.getLogger(__name__)

#: What marks the directory of a Python environment: its links lead to the interpreter that it was made of.
_ENVIRONMENT = frozenset(("pyvenv.cfg", "conda-meta"))
#: How the name of a parameter of a load begins that brings a file along.
_FILE = "file:"
_LOCK = ".lock"


def check_files(model_path: Path, roots: Iterable[str | Path], *, allow_external_links: bool) -> None:
    """Raise `LoadError` for the first file at or below ``model_path`` that no model may have.

    That is a link that leads out of all repositories, unless these are allowed, and a FIFO or a device, on which an
    engine that opens it would wait for ever. ``roots`` are the other repositories; the model's own is the directory
    that it stands in. Looks into directories behind links, once each. Blocks.
    """
    inside = tuple(os.path.realpath(root) for root in (model_path.parent, *roots))
    for path, target, mode in _files(str(model_path)):
        if target and not (allow_external_links or any(Path(target).is_relative_to(root) for root in inside)):
            log.error("model '%s': '%s' is a link to '%s'", model_path.name, path, target)
            raise LoadError(
                f"'{os.path.relpath(path, model_path.parent)}' is a link that leads out of the model repository; "
                "--allow-external-links=true permits it"
            )
        kind = special_kind(mode)
        if kind and not stat.S_ISSOCK(mode):  # to open a socket fails at once
            raise LoadError(
                f"'{os.path.relpath(path, model_path.parent)}' is {kind}: a model consists of regular files and "
                "directories"
            )


def _files(top: str) -> Iterator[tuple[str, str, int]]:
    """Every file at or below ``top``, what is at its end if it is a link, and its mode; 0 if there is nothing.

    Hidden files are looked at, too: links hide there."""
    if Path(top).is_symlink():
        yield top, os.path.realpath(top), 0
    visited = {os.path.realpath(top)}
    waiting = [top]
    while waiting:
        entries = _list(waiting.pop())
        if not _ENVIRONMENT.isdisjoint(entry.name for entry in entries):
            continue
        for entry in entries:
            real = os.path.realpath(entry.path) if entry.is_symlink() else ""
            mode = _mode(entry)
            yield entry.path, real, mode
            if stat.S_ISDIR(mode) and (place := real or os.path.realpath(entry.path)) not in visited:
                visited.add(place)
                waiting.append(entry.path)


def _mode(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_mode
    except OSError:  # a link to nowhere
        return 0


def _list(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:  # a file that cannot be looked at cannot be loaded either, and that error is the better one
        return []


def read_labels(config: ModelConfig, model_path: Path) -> dict[str, list[str]]:
    """The lines of each output's label file, blank lines kept.

    Raises `Unsupported` for a file outside the model directory, `LoadError` for an unreadable one.
    """
    return {
        io.name: _read(config.name, io.name, io.label_filename, model_path) for io in config.output if io.label_filename
    }


def check_labels(config: ModelConfig, model_path: Path) -> Iterator[Problem]:
    """Every file for which `read_labels` would raise, but those whose names the rules for paths refuse."""
    for index, io in enumerate(config.output):
        try:
            if io.label_filename and not why_path_leaves(io.label_filename):
                _read(config.name, io.name, io.label_filename, model_path)
        except HeadraceError as error:
            yield Problem(f"output[{index}].label_filename", error.message, error.code)


def _read(model: str, output: str, filename: str, model_path: Path) -> list[str]:
    path = model_path / posixpath.normpath(filename)  # not through a link and up again
    if why_path_leaves(filename):
        raise Unsupported(
            f"label file path '{filename}' for output '{output}' in model '{model}' is outside model directory"
        )
    try:
        lines = read_regular(path).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read label file '{path}' for output '{output}' of model '{model}': {error}") from error
    return lines if lines[-1] else lines[:-1]


# ---------------------------------------------------------------------------
# What a load brings along
# ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overrides:
    """``config`` takes the place of the config file; ``files`` are the model, by path below its directory."""

    config: ModelConfig | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def parse_overrides(parameters: Mapping[str, str | bytes]) -> Overrides:
    """The overrides in the parameters of a load. Raises `InvalidArgument` or `ConfigError`."""
    files = {}
    for name, value in parameters.items():
        if name.startswith(_FILE) and isinstance(value, bytes):
            files[_inside(name)] = value
        elif name != "config" or not isinstance(value, str):
            kind = "BYTES" if isinstance(value, bytes) else "STRING"
            raise InvalidArgument(f"Unrecognized load parameter '{name}' with type '{kind}'")
    config = parameters.get("config")
    if files and config is None:
        raise InvalidArgument("Load parameter 'config' must be specified for model file override")
    return Overrides(parse_json(config) if isinstance(config, str) else None, files)


def write_files(files: Mapping[str, bytes], model_path: Path) -> None:
    """Write ``files`` into the empty directory ``model_path``. Raises `InvalidArgument` naming the file at fault."""
    for name, content in files.items():
        path = model_path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except (FileExistsError, NotADirectoryError):
            text = f"Invalid file parameter '{_FILE}{name}', directory has been created as a file"
            raise InvalidArgument(text) from None
        except IsADirectoryError:
            raise InvalidArgument(f"Invalid file parameter '{_FILE}{name}', it is another's directory") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a file name"
            raise InvalidArgument(f"Invalid file parameter '{_FILE}{name}', cannot be written: {reason}") from error


def _inside(parameter: str) -> str:
    """The path that ``parameter`` names, relative to the model's directory; raises if it leads out of it."""
    name = parameter.removeprefix(_FILE)
    path = posixpath.normpath(name.lstrip("/") or ".")  # as Triton: a slash in front is joined below the directory
    if "\0" in name or path in (".", "..") or path.startswith("../"):
        shown = path.replace("\0", "\\0")
        raise InvalidArgument(
            f"Invalid file parameter '{parameter}' with normalized path '{shown}' must stay within model directory."
        )
    return path


class TemporaryDirectories:
    """The directories of this process. Methods block and may be called from any thread."""

    def __init__(self) -> None:
        self._user = Path(tempfile.gettempdir()) / f"headrace-{os.geteuid()}"
        self._own: Path | None = None
        self._lock = -1
        self._mutex = threading.Lock()

    def make(self, name: str) -> Path:
        """A new, empty directory called ``name``, inside one of its own.

        ``name`` must be no path. Raises `InvalidArgument` if the file system does not take it.
        """
        with self._mutex:
            own = self._own or self._open()
        folder = Path(tempfile.mkdtemp(dir=own))
        try:
            (folder / name).mkdir(mode=0o700)
        except (OSError, ValueError) as error:
            folder.rmdir()
            reason = error.strerror if isinstance(error, OSError) else "it has characters that no file name has"
            raise InvalidArgument(f"no directory can be called '{name}': {reason}") from error
        return folder / name

    def sweep(self) -> None:
        """Remove what processes left behind that were killed."""
        if self._user.exists():
            with self._locked() as user:
                _remove_abandoned(user)

    def close(self) -> None:
        """Remove the directories of this process."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            os.close(self._lock)
            self._own = None

    def _open(self) -> Path:
        with self._locked() as user:
            self._own = Path(tempfile.mkdtemp(dir=user))
            self._lock = _lock(self._own / _LOCK)
            return self._own

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Path]:
        """The user's directory, while no other process creates or sweeps in it."""
        with contextlib.suppress(FileExistsError):
            self._user.mkdir(mode=0o700)
        found = self._user.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise LoadError("the directory for the files of loaded models is not private to the server's user")
        lock = _lock(self._user / _LOCK, wait=True)
        try:
            yield self._user
        finally:
            os.close(lock)


def remove(model_path: Path) -> None:
    """Remove what `TemporaryDirectories.make` made."""
    shutil.rmtree(model_path.parent, ignore_errors=True)


def _remove_abandoned(user: Path) -> None:
    for path in user.iterdir():
        if path.is_dir():
            with contextlib.suppress(OSError):  # its owner lives
                os.close(_lock(path / _LOCK))
                shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path, wait: bool = False) -> int:
    """An open file descriptor that holds the lock; raises `OSError` if another process does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
