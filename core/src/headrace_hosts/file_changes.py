"""Finds changed files that a running server must read again: certificates, keys of callers."""

from __future__ import annotations

import stat
from collections.abc import Callable, Hashable
from pathlib import Path
from time import monotonic

#: The files are checked for changes at most this often.
CHECK_S = 1.0


class FileChanges:
    """Finds changes of the files at ``paths`` by inode, time and size. It does not read their content.

    A path may be missing, or not a regular file. One thread at a time.
    """

    def __init__(self, *paths: str | Path, clock: Callable[[], float] = monotonic) -> None:
        self._paths, self._clock = tuple(map(Path, paths)), clock
        self._state, self._checked_s = self._read(), clock()

    def are_due(self) -> bool:
        """True at most once per second. Then call `found`, on another thread if the disk may be slow."""
        now_s = self._clock()
        if now_s - self._checked_s < CHECK_S:
            return False
        self._checked_s = now_s
        return True

    def found(self) -> bool:
        """True if a file has changed since the last call, or since the creation. Blocks for one ``stat`` per file."""
        before, self._state = self._state, self._read()
        return self._state != before

    def _read(self) -> Hashable:
        return tuple(map(_state, self._paths))


def _state(path: Path) -> Hashable:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None
