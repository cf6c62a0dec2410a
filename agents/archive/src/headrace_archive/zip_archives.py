"""Reads zip archives."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from headrace_archive.members import CHUNK_BYTES, ArchiveMember, Budget, Content, RefusedArchive, shown

#: The minimum bytes of an entry in the directory of an archive, and the maximum for its name and extra fields.
_ENTRY_BYTES = 46 + 466
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def read_zip(source: BinaryIO, budget: Budget) -> Iterator[ArchiveMember]:
    """Yield the members of the zip archive ``source``. Raises `RefusedArchive`, and what zipfile raises."""
    limited = _BoundedReads(source, CHUNK_BYTES + budget.max_files * _ENTRY_BYTES)
    with zipfile.ZipFile(limited) as archive:
        for info in archive.infolist():
            budget.add_file()
            member = _checked(info)
            if info.is_dir():
                yield member
                continue
            with archive.open(info) as content:
                yield ArchiveMember(member.name, _Counted(content, budget), member.is_executable)


def _checked(info: zipfile.ZipInfo) -> ArchiveMember:
    """Return the member without its content. Raises `RefusedArchive`."""
    name = info.orig_filename  # `filename` ends at a NUL
    mode = info.external_attr >> 16
    kind = stat.S_IFMT(mode)
    why = ""
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        what = "a link" if kind == stat.S_IFLNK else "a device, a FIFO or a socket"
        why = f"is {what}: only files and directories are unpacked"
    elif (kind == stat.S_IFDIR) != info.is_dir() and kind:
        why = "is a file by its name and a directory by its mode, or the other way round"
    elif info.is_dir() and info.file_size:
        why = "is a directory with content"
    elif mode & 0o6000 and not info.is_dir():
        why = "is set-uid or set-gid"
    elif info.flag_bits & 1:
        why = "is encrypted"
    elif info.compress_type not in _METHODS:
        why = f"is compressed by method {info.compress_type}, expected 'stored' or 'deflated'"
    if why:
        raise RefusedArchive(f"member '{shown(name)}' {why}")
    return ArchiveMember(name, None, bool(mode & 0o100))


class _Counted:
    """Counts what is read of ``content``."""

    def __init__(self, content: Content, budget: Budget) -> None:
        self._content, self._budget = content, budget

    def read(self, size: int) -> bytes:
        part = self._content.read(size)
        self._budget.add_bytes(len(part))
        return part


class _BoundedReads:
    """A file, of which at most ``limit`` bytes are read at once: zipfile reads a whole directory into memory."""

    def __init__(self, source: BinaryIO, limit: int) -> None:
        self._source, self._limit = source, limit
        self.seek, self.tell, self.seekable = source.seek, source.tell, source.seekable

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = os.fstat(self._source.fileno()).st_size - self._source.tell()
        if size > self._limit:
            raise RefusedArchive("its directory has more entries than parameter 'max_files' allows")
        return self._source.read(size)
