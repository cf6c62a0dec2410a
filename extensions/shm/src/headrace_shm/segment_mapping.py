"""POSIX shared memory, mapped: the part of a client's segment that is one region."""

from __future__ import annotations

import os
import stat
from errno import ENOENT
from pathlib import Path

from headrace import SharedMapping

_DIRECTORY = Path("/dev/shm")


def open_segment(key: str) -> int:
    """Return a descriptor of the segment ``key``, without slashes before it, as ``shm_open`` does.

    Raises OSError if there is none, if it is not a regular file, or if this process may not read and write it.
    """
    if "/" in key or "\0" in key or key in (".", ".."):
        raise OSError(ENOENT, f"{key!a} is no name of a segment")
    # Not a link, not a terminal that would become this process's, not a pipe that waits for its other end.
    descriptor = os.open(_DIRECTORY / key, os.O_RDWR | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(ENOENT, f"{key!a} is no regular file")
    return descriptor


class SegmentMapping(SharedMapping):
    """``size`` bytes of the segment ``key`` from ``offset`` on."""

    def __init__(self, key: str, offset: int, size: int) -> None:
        """Map the segment. Raises OSError, and `FileTooSmall`."""
        descriptor = open_segment(key)
        try:
            super().__init__(descriptor, offset, size)
            self._key, self._file = key, _identity(descriptor)
        finally:
            os.close(descriptor)

    def reopen(self) -> int:
        descriptor = open_segment(self._key)
        if _identity(descriptor) != self._file:  # the client has created another one
            os.close(descriptor)
            raise OSError(ENOENT, f"{self._key!a} is another segment")
        return descriptor


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
