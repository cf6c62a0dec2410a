"""Environments shared by all servers of this user: ``$HEADRACE_CACHE/environments/<key>``.

Scripts of an environment contain its path, so it is created in its final place. A file beside it marks it as complete,
and a lock prevents two servers from creating it at once. The system releases the lock of a server that is killed. The
next server that creates an environment removes incomplete ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace import LoadError

log = logging.getLogger("headrace.python")

_LOCK, _MARK, _ENVIRONMENT = "lock", "whole", "env"


def cached(key: str, make: Callable[[Path], None]) -> Path:
    """Return the environment ``key``. If it does not exist, ``make`` creates it at the path in its argument.

    Blocks while another thread or server creates it. Raises `LoadError`, and exceptions of ``make``, after removing the
    environment.
    """
    try:
        root = _root()
        folder = root / key
        with _locked(folder):
            if not (folder / _MARK).exists():
                _sweep(root)
                _make(folder, make)
        return folder / _ENVIRONMENT
    except OSError as error:
        raise LoadError(
            f"no environment can be kept in '{error.filename}': {error.strerror}; "
            "HEADRACE_CACHE may name another directory"
        ) from error


def _root() -> Path:
    """Return the directory of this user's environments. Raises `LoadError` if others may write there."""
    directory = os.environ.get("HEADRACE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "headrace")
    root = Path(os.path.expandvars(directory)).expanduser().absolute() / "environments"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LoadError(f"directory '{root}' must belong to the server's user only (mode 700)")
    return root


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    environment = folder / _ENVIRONMENT
    _remove(environment)
    try:
        make(environment)
    except BaseException:
        _remove(folder)
        raise
    (folder / _MARK).touch(mode=0o600)


def _sweep(root: Path) -> None:
    """Remove incomplete environments that no process is creating."""
    for folder in root.iterdir():
        if (folder / _LOCK).exists() and not (folder / _MARK).exists():
            with contextlib.suppress(OSError), _locked(folder, wait=False):
                if not (folder / _MARK).exists():
                    _remove(folder)


def _remove(folder: Path) -> None:
    """Remove ``folder``, including directories without write permission, which packages may have."""
    if folder.exists():
        for path, _, _ in os.walk(folder):
            Path(path).chmod(0o700)
        shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of ``folder``, and create the folder if it does not exist.

    Raises `BlockingIOError` if another process has the lock and ``wait`` is False.
    """
    while (descriptor := _lock(folder, wait)) is None:
        pass  # the process that held the lock failed, and removed the folder
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path, wait: bool) -> int | None:
    """Return the descriptor that holds the lock of ``folder``; None if that was removed meanwhile."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            log.info("waiting for the environment that another load is making")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if (folder / _LOCK).stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
