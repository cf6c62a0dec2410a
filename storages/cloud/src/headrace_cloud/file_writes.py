"""Writes files of known size. Its errors name a full disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace import LoadError
from headrace_cloud.stored_objects import PART_BYTES

#: The settings of the cache's directory and of the models' directories.
CACHE, MODELS = "--cloud-cache-directory", "TMPDIR"
#: Writes a file of known size to a file descriptor.
Download = Callable[[int], None]


def fill(descriptor: int, size: int, download: Download) -> None:
    """Write a file of ``size`` bytes. Raises `OSError` for a full disk, before a large download."""
    if size > PART_BYTES:  # a full disk is found before the download, not in its middle
        os.posix_fallocate(descriptor, 0, size)
    if size:
        download(descriptor)


def write_new(target: Path, size: int, download: Download) -> None:
    """Write the file ``target``, which must not exist."""
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fill(descriptor, size, download)
    finally:
        os.close(descriptor)


@contextmanager
def worded(path: Path, size: int, setting: str) -> Iterator[None]:
    """Convert errors of writing ``path`` to a `LoadError`, except `FileNotFoundError`.

    ``setting`` is the flag or variable of the directory.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full(path.parent, size, setting) from error
        raise LoadError(f"'{path}' cannot be written: {error.strerror}") from error


def full(path: Path, size: int, setting: str) -> LoadError:
    """Return the error for a disk that ``size`` bytes do not fit on."""
    return LoadError(f"the disk of '{path}' is full: {size} bytes do not fit. {setting} names another place")
