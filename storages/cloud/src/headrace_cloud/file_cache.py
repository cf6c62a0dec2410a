"""Downloaded files of all servers of one user on a machine, in one directory of bounded size.

An entry is named by the digest of the bucket, key, size and tag of an object, and never changes: other content has
another name. A modified entry is downloaded again (`headrace_cloud.cache_entry`).

Large files are read-only hard links in the directory of the model. Small ones are copies, so that a model may write to
its own files.

====================  ==============================================================================================
``files/<digest>``    An entry. Its access time is its last use: the least recently used is removed first.
``partial/<digest>``  A file while it arrives. The server that writes it holds a lock on it, and others wait. After a
                      server was killed it is not locked, and it is removed at the next start.
====================  ==============================================================================================
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace import ConfigError, LoadError, Unavailable
from headrace_cloud.cache_entry import is_whole, mark_used, mark_written, sync
from headrace_cloud.file_writes import CACHE, MODELS, Download, fill, full, worded, write_new

log = logging.getLogger(__name__)

#: Larger files are linked, not copied.
LINKED_BYTES = 16 << 20
_WAIT_S = 0.1


class FileCache:
    """The cache below ``directory``, with at most ``max_bytes``. Any thread; methods block."""

    def __init__(self, directory: Path, max_bytes: int, closing: threading.Event) -> None:
        self._max_bytes, self._closing = max_bytes, closing
        self._warned_of_copies = False
        #: The partial files that this process writes now.
        self._own: set[Path] = set()
        self.path = directory / f"headrace-cloud-{os.geteuid()}"
        self._files, self._partial = self.path / "files", self.path / "partial"
        if max_bytes:
            self._make()
            self._sweep()

    def _make(self) -> None:
        """Create the directories that are missing. Raises `ConfigError` if others may write to them."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            found = self.path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise ConfigError(
                    f"the cache '{self.path}' is not a directory that only the server's user can write to"
                )
            for folder in (self._files, self._partial):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the cache directory '{self.path}' cannot be made: {error.strerror}") from error

    def keeps(self, size: int) -> bool:
        """True if a file of ``size`` bytes fits the cache. A larger one is only in the directory of its model."""
        return size <= self._max_bytes and self._max_bytes > 0

    def has(self, name: str, size: int) -> bool:
        """True if there is an unmodified entry. Marks it as used, so that `make_room` keeps it."""
        if not self.keeps(size) or not is_whole(self._files / name, size):
            return False
        with suppress(FileNotFoundError):
            mark_used(self._files / name)
            return True
        return False

    def place(self, name: str, size: int, target: Path, download: Download) -> bool:
        """Put the file ``name`` at ``target``, which must not exist. Download it if the cache does not have it.

        Returns True if the cache had it. Raises what ``download`` raises, `LoadError` if the disk is full or the cache
        was removed, and `Unavailable` if the server stops while another one downloads it. Nothing is left then.
        """
        if not self.keeps(size):
            with worded(target, size, MODELS):
                write_new(target, size, download)
            return False
        had, path = True, self._partial / name
        try:
            while not self.take(name, size, target):
                with worded(path, size, CACHE), self._filling(name) as descriptor:
                    if descriptor is None or is_whole(self._files / name, size):
                        continue  # another server has filled it
                    had = False
                    fill(descriptor, size, download)
                    os.fchmod(descriptor, 0o400 if size > LINKED_BYTES else 0o600)
                    mark_written(descriptor, name)
                    path.rename(self._files / name)
        except FileNotFoundError as error:
            if self._closing.is_set():  # `close` has removed the partial file
                raise Unavailable("the server is stopping") from None
            raise LoadError(f"the cache '{self.path}' was removed while it was in use") from error
        return had

    def make_room(self, size: int) -> None:
        """Remove the least recently used entries until ``size`` bytes fit. Raises `LoadError` if the disk is full.

        Creates the directories again if another program has removed them, for example from ``/tmp``.
        """
        if not self._max_bytes:
            return
        self._make()
        entries = sorted(self._entries())  # the one used longest ago is the first
        total = sum(found for _, found, _ in entries)
        if size > self._free() + total:  # it would be in vain to remove them
            raise full(self.path, size, CACHE)
        for _, found, path in entries:
            if total + size <= self._max_bytes and self._free() >= size:
                return
            path.unlink(missing_ok=True)
            total -= found
        if size > self._free():
            raise full(self.path, size, CACHE)

    def _free(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def _entries(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the time of the last use, the size and the path of each entry."""
        with os.scandir(self._files) as entries:
            for entry in entries:
                with suppress(OSError):  # another server has removed it
                    found = entry.stat()
                    yield found.st_atime_ns, found.st_size, Path(entry.path)

    def take(self, name: str, size: int, target: Path) -> bool:
        """Put the entry at ``target``, which must not exist. False if there is none. Raises as `place`."""
        if not self.keeps(size):
            return False
        path = self._files / name
        if not is_whole(path, size):
            return False
        try:
            mark_used(path)
            if size > LINKED_BYTES and self._link(path, target):
                return True
            with worded(target, size, MODELS):
                shutil.copyfile(path, target)
        except FileNotFoundError:  # another server has removed it
            target.unlink(missing_ok=True)
            return False
        return True

    def _link(self, path: Path, target: Path) -> bool:
        try:
            os.link(path, target)
        except FileNotFoundError:
            raise
        except OSError as error:
            if not self._warned_of_copies:
                self._warned_of_copies = True
                log.warning(
                    "large files are copied from the cache '%s', because they cannot be linked to '%s' (%s): set "
                    "--cloud-cache-directory or TMPDIR to a directory on the same file system",
                    *(self.path, target.parent, error.strerror),
                )
            return False
        return True

    @contextmanager
    def _filling(self, name: str) -> Iterator[int | None]:
        """Yield a descriptor of the empty partial file, locked; None if another server has finished it meanwhile."""
        path = self._partial / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            while not _lock(descriptor):
                if self._closing.wait(_WAIT_S):
                    raise Unavailable("the server is stopping")
            if not _is_at(descriptor, path):
                yield None
                return
            try:
                self._own.add(path)
                os.ftruncate(descriptor, 0)
                yield descriptor
            finally:
                self._own.discard(path)
                if _is_at(descriptor, path):  # it was not renamed
                    path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def sync_later(self, names: Collection[str]) -> None:
        """Write the entries ``names`` to the disk, on a thread. Until then they are lost if the machine stops."""

        def sync_all() -> None:
            for name in names:
                sync(self._files / name)

        if self._max_bytes:
            threading.Thread(target=sync_all, name="cloud sync", daemon=True).start()

    def close(self) -> None:
        """Remove the files that are still being written. The process may end before their downloads do."""
        for path in tuple(self._own):
            path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove the partial files of servers that were killed."""
        for path in self._partial.iterdir():
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if _lock(descriptor) and _is_at(descriptor, path):
                        path.unlink(missing_ok=True)
                finally:
                    os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """True if ``path`` is the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
