"""What a load may bring along: another config, or all files of the model (docs/spec/behaviours.md section 5.4).

The files are written to private directories, gone when the server is, even after SIGKILL: each process
has a directory of its own below one per user, and holds a lock on it. Whoever starts next removes the
directories whose lock nobody holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import posixpath
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.parse import parse_json
from headrace.errors import InvalidArgument, LoadError

_FILE = "file:"


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


_LOCK = ".lock"


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
