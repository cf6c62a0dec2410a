"""Private directories for files that are on this machine only while they are used.

They are removed with the server, even after SIGKILL. Each process has its own directory below one per user, and holds a
lock on it. A server that starts removes the directories without a locked lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import InvalidArgument, LoadError

_LOCK = ".lock"


class TemporaryDirectories:
    """The directories of this process. Methods block and may be called from any thread."""

    def __init__(self) -> None:
        self._user = Path(tempfile.gettempdir()) / f"headrace-{os.geteuid()}"
        self._own: Path | None = None
        self._lock = -1
        self._mutex = threading.Lock()

    def make(self, name: str) -> Path:
        """Return a new, empty directory ``name``, in a directory of its own.

        ``name`` must not be a path. Raises `InvalidArgument` if the file system refuses it.
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
        """Remove the directories of processes that were killed."""
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
        """Yield the user's directory, while no other process creates or removes anything in it."""
        with contextlib.suppress(FileExistsError):
            self._user.mkdir(mode=0o700)
        status = self._user.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise LoadError("the directory for the files of loaded models is not private to the server's user")
        lock = _lock(self._user / _LOCK, wait=True)
        try:
            yield self._user
        finally:
            os.close(lock)


def remove(model_path: Path) -> None:
    """Remove a directory that `TemporaryDirectories.make` created."""
    shutil.rmtree(model_path.parent, ignore_errors=True)


def _remove_abandoned(user: Path) -> None:
    for path in user.iterdir():
        if path.is_dir():
            with contextlib.suppress(OSError):  # its process is alive
                os.close(_lock(path / _LOCK))
                shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path, wait: bool = False) -> int:
    """Return an open file descriptor that holds the lock. Raises `OSError` if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
