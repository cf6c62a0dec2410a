"""Entries of the cache: their names, and how one that is not as it was written is found without reading it.

The modification time of an entry is computed from its name, so any write to it shows. There are two such times:

- One is computed with the number of the boot, too. An entry has it while its bytes may not be on the disk yet: after a
  crash of the machine, they may be zeros.
- The other is set when the bytes are on the disk (`sync`), and stays valid.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

#: Computed times are in the years 2001 to 2033.
_FIRST_NS, _RANGE_NS = 10**18, 10**18
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def entry_name(*identity: object) -> str:
    """Return the name of the entry for an object."""
    return _digest(*map(str, identity))


def mark_written(descriptor: int, name: str) -> None:
    """Give an entry the time of one that was written since the machine was started."""
    os.utime(descriptor, ns=(time.time_ns(), _written_ns(name)))


def mark_used(path: Path) -> None:
    """Set the time of the last use. Raises `FileNotFoundError` if another server has removed the entry."""
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def is_whole(path: Path, size: int) -> bool:
    """True if the entry ``path`` exists and is unmodified. Removes a modified one. Blocks."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    times = (_synced_ns(path.name), _written_ns(path.name))
    if stat.S_ISREG(found.st_mode) and found.st_size == size and found.st_mtime_ns in times:
        return True
    log.warning("the cache entry '%s' is not as it was written: it is removed and downloaded again", path)
    path.unlink(missing_ok=True)
    return False


def sync(path: Path) -> None:
    """Write the bytes of an entry to the disk, and record that in its time. Does nothing if it was removed. Blocks."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_mtime_ns == _written_ns(path.name):
                os.fsync(descriptor)
                found = os.fstat(descriptor)
                if found.st_mtime_ns == _written_ns(path.name):
                    os.utime(descriptor, ns=(found.st_atime_ns, _synced_ns(path.name)))
        finally:
            os.close(descriptor)


def _written_ns(name: str) -> int:
    return _time_ns(_digest(name, _read_boot(_BOOT)))


@cache
def _read_boot(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _synced_ns(name: str) -> int:
    return _time_ns(name)


def _time_ns(digest: str) -> int:
    return _FIRST_NS + int(digest[:16], 16) % _RANGE_NS


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
