"""Opens the files of a model, and only regular files: a FIFO or a device may block its reader for ever.

To open a FIFO blocks until a writer opens it, and to read ``/dev/zero`` never ends. A path may lead to another file at
any time. So the file is opened without blocking, and its type is checked when it is open.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_PIECE_BYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def special_kind(mode: int) -> str:
    """Return the kind of a file with ``mode``, such as "a FIFO"; empty for a regular file or a directory."""
    return _KINDS.get(stat.S_IFMT(mode), "")


def open_regular(path: Path) -> BinaryIO:
    """Open the regular file ``path`` for reading. Raises `OSError` for any other kind of file. Never blocks."""
    _require_regular(path.stat(), path)  # before opening it: to open a device may have side effects
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        _require_regular(os.fstat(descriptor), path)  # again: the path may lead to another file by now
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """Return the content of the regular file ``path``. Raises `OSError` as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


@contextmanager
def in_memory(path: Path) -> Iterator[str]:
    """Read the regular file ``path`` into the page cache, and yield a name by which an engine can open that same file.

    For engines that open and read files while they hold the GIL: the whole server would wait for a slow disk, or for
    ever for a FIFO. The name is valid inside the context; outside Linux it is ``path``. Raises `OSError` as
    `open_regular`.
    """
    with open_regular(path) as file:
        read_ahead(file)
        yield f"/proc/self/fd/{file.fileno()}" if sys.platform == "linux" else str(path)


def read_ahead(file: BinaryIO) -> None:
    """Load all of ``file`` into the system's page cache. Reads only missing pages, without the GIL."""
    piece, first = bytearray(_PIECE_BYTES), bytearray(1)
    descriptor = file.fileno()
    for offset in range(0, os.fstat(descriptor).st_size, _PIECE_BYTES):
        try:
            os.preadv(descriptor, [first], offset, os.RWF_NOWAIT)  # succeeds only for cached pages
        except (AttributeError, OSError):  # not on Linux, or not cached
            file.seek(offset)
            file.readinto(piece)  # type: ignore[attr-defined]


def _require_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = special_kind(status.st_mode) or "of an unknown kind"
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
