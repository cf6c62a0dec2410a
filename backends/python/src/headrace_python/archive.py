"""Unpacks the archive of an environment, and checks every member before it is written.

A user who may add a model with an archive may not be allowed to write elsewhere. The rules are stricter than tarfile's
filter ``data``, which older Pythons lack: nothing is written through a link, so the text of a link's target is also its
real target.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

from headrace import LoadError, open_regular

MAX_MEMBERS = 1_000_000
_COPY_BYTES = 1 << 20


class RefusedMember(Exception):
    """The reason why a member is not unpacked."""


class Unpacking:
    """Writes members below ``root``, up to ``max_bytes`` in all."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._left = self._max = max_bytes
        self._count = 0
        self._files: set[str] = set()
        self._links: set[str] = set()
        root.mkdir(mode=0o700)

    def add(self, members: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write ``member``. Raises `RefusedMember`."""
        self._count += 1
        if self._count > MAX_MEMBERS:
            raise RefusedMember(f"is one of more than {MAX_MEMBERS}")
        name = self._name(member.name)
        path = self._root / name
        folder = path if member.isdir() else path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise RefusedMember("lies below a file") from None
        if not member.isdir():
            self._add_leaf(members, member, name, path)

    def _add_leaf(self, members: tarfile.TarFile, member: tarfile.TarInfo, name: str, path: Path) -> None:
        if name in self._files or path.exists():
            raise RefusedMember("comes twice")
        if member.issym():
            path.symlink_to(self._target(name, member.linkname))
            self._links.add(name)
        elif member.islnk():
            path.hardlink_to(self._root / self._original(member.linkname))
            self._files.add(name)
        elif member.isfile():
            self._write(members, member, path)
            self._files.add(name)
        else:
            raise RefusedMember("is a device or a pipe")

    def _write(self, members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        self._left -= abs(member.size)
        if self._left < 0:
            raise RefusedMember(f"is more than fits: an archive of this size may hold {self._max >> 20} MiB")
        source = members.extractfile(member)
        assert source is not None
        mode = member.mode & 0o755 | 0o600
        with source, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            shutil.copyfileobj(source, file, _COPY_BYTES)
        os.utime(path, (member.mtime, member.mtime))  # or byte code would be out of date

    def _name(self, entry: str) -> str:
        """Return ``entry`` as a path below the root that passes no link."""
        path = PurePosixPath(entry)
        if path.is_absolute():
            raise RefusedMember("has an absolute path")
        if ".." in path.parts:
            raise RefusedMember("climbs out with '..'")
        for place in (path, *path.parents):
            if str(place) in self._links:
                raise RefusedMember(f"lies behind the link '{place}'")
        return str(path)

    def _target(self, name: str, target: str) -> str:
        """Return ``target`` of the link ``name``. Raises `RefusedMember` unless it is relative and below the root."""
        path = PurePosixPath(target)
        climbs = path.parts.count("..")
        deep = len(PurePosixPath(name).parts) - 1
        if not target or path.is_absolute() or climbs > deep or ".." in path.parts[climbs:]:
            raise RefusedMember(f"is a link that leads out, to '{target[:200]}'")
        return target

    def _original(self, target: str) -> str:
        """Return the name of the file that a hard link refers to."""
        name = self._name(target)
        if name not in self._files:
            raise RefusedMember(f"is a hard link to '{target[:200]}', which is no file before it")
        return name


#: All files together may have this many times the bytes of the archive, or `FREE_BYTES` if that is more.
MAX_RATIO = 30
FREE_BYTES = 1 << 30
#: The most bytes of a header or a path. A forged length would be read into memory.
_MAX_READ = 1 << 20

_OPENERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


#: The exceptions of reading a broken archive.
_MALFORMED = (
    tarfile.TarError,
    EOFError,
    OverflowError,
    RecursionError,
    ValueError,
    zlib.error,
    lzma.LZMAError,
)


def unpack(archive: Path, into: Path) -> None:
    """Unpack a tar archive, plain or compressed with gzip, bzip2 or xz, into the new directory ``into``.

    Owners, setuid bits and write permissions of others are dropped. Raises `LoadError` with the first refused member;
    the caller removes the files unpacked until then. Raises OSError if ``into`` cannot be written.
    """
    with open_regular(archive) as packed:
        unpacking = Unpacking(into, max(FREE_BYTES, MAX_RATIO * os.fstat(packed.fileno()).st_size))
        try:
            _unpack(archive, _Bounded(_opened(packed)), unpacking)
        except _MALFORMED as error:
            raise LoadError(f"environment '{archive}' is no whole tar archive: {error}") from error


def _unpack(archive: Path, source: _Bounded, unpacking: Unpacking) -> None:
    with tarfile.open(fileobj=cast("BinaryIO", source), mode="r:") as members:
        for member in members:
            try:
                unpacking.add(members, member)
            except RefusedMember as error:
                name = member.name[:200].encode("unicode_escape").decode()
                raise LoadError(f"environment '{archive}' is refused: member '{name}' {error}") from error
            members.members = []  # type: ignore[attr-defined]  # tarfile keeps them all
    if source.last != bytes(tarfile.BLOCKSIZE):  # tarfile stops without an error if a header is missing
        raise tarfile.ReadError("its end is missing")


def _opened(packed: IO[bytes]) -> Any:
    """Return the decompressed content of ``packed``. Its first bytes identify the compression."""
    magic = packed.read(6)
    packed.seek(0)
    for start, opener in _OPENERS.items():
        if magic.startswith(start):
            return opener(packed)
    return packed


class _Bounded(io.RawIOBase):
    """Refuses to read more bytes at once than a header may have: tarfile reads a header of any declared size.

    ``last`` is the last block read: zeros for a complete archive.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_READ:
            raise tarfile.ReadError(f"a header is {size} bytes long")
        self.last = bytes(self._call(self._source.read, size))
        return self.last

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._call(self._source.seek, offset, whence))

    def tell(self) -> int:
        return int(self._source.tell())

    def _call(self, method: Callable[..., Any], *arguments: int) -> Any:
        try:
            return method(*arguments)
        except OSError as error:  # from gzip or bz2, for malformed data
            raise tarfile.ReadError(str(error)) from error
