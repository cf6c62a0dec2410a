"""Opens the files of a model, and only regular files: a FIFO or a device may keep its reader waiting for ever.

To open a FIFO waits until somebody writes, and to read ``/dev/zero`` has no end. What a path leads to may change at any
time, so that the type of the file is looked at after it is open, and opening never waits.
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
    """Return what a file of ``mode`` is, "a FIFO" for example; empty for a regular file and for a directory."""
    return _KINDS.get(stat.S_IFMT(mode), "")


def open_regular(path: Path) -> BinaryIO:
    """Return the regular file ``path``, open for reading. Raises `OSError` for anything else, and never waits."""
    _require_regular(path.stat(), path)  # to open a device may already do something
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        _require_regular(os.fstat(descriptor), path)  # what it was before may have been another file
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """Return what the regular file ``path`` holds. Raises `OSError` as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


@contextmanager
def in_memory(path: Path) -> Iterator[str]:
    """Read the regular file ``path``, and give a name under which an engine may open the very same file.

    For engines that open and read files while they hold the interpreter's lock: all of the server would wait with them
    for a slow disk, or for ever for a FIFO. Raises `OSError` as `open_regular`. The name is good until the end of the
    context; outside Linux it is ``path``.
    """
    with open_regular(path) as file:
        read_ahead(file)
        yield f"/proc/self/fd/{file.fileno()}" if sys.platform == "linux" else str(path)


def read_ahead(file: BinaryIO) -> None:
    """Have the system keep all of ``file`` in memory. Reads only what is not there, without the interpreter's lock."""
    piece, first = bytearray(_PIECE_BYTES), bytearray(1)
    descriptor = file.fileno()
    for offset in range(0, os.fstat(descriptor).st_size, _PIECE_BYTES):
        try:
            os.preadv(descriptor, [first], offset, os.RWF_NOWAIT)  # only what is in memory
        except (AttributeError, OSError):  # elsewhere than on Linux, or it is not
            file.seek(offset)
            file.readinto(piece)  # type: ignore[attr-defined]


def _require_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = special_kind(found.st_mode) or "of an unknown kind"
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
