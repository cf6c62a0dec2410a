"""Judges each member of an archive, and writes it below one directory or not at all.

The rules are stricter than those of tarfile's filter ``data``, which older Pythons lack: nothing is
written through a link, so what a link's target says is also where it leads.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

MAX_MEMBERS = 1_000_000
_COPY_BYTES = 1 << 20


class RefusedMember(Exception):
    """Why a member is not unpacked."""


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
        """Raises `RefusedMember`."""
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

    def _name(self, given: str) -> str:
        """``given`` as a path below the root that passes no link."""
        path = PurePosixPath(given)
        if path.is_absolute():
            raise RefusedMember("has an absolute path")
        if ".." in path.parts:
            raise RefusedMember("climbs out with '..'")
        for place in (path, *path.parents):
            if str(place) in self._links:
                raise RefusedMember(f"lies behind the link '{place}'")
        return str(path)

    def _target(self, name: str, target: str) -> str:
        """``target`` of the link ``name``: ``..`` only in front, and no more often than ``name`` is deep."""
        path = PurePosixPath(target)
        climbs = path.parts.count("..")
        deep = len(PurePosixPath(name).parts) - 1
        if not target or path.is_absolute() or climbs > deep or ".." in path.parts[climbs:]:
            raise RefusedMember(f"is a link that leads out, to '{target[:200]}'")
        return target

    def _original(self, target: str) -> str:
        """The file of which a member is another name."""
        name = self._name(target)
        if name not in self._files:
            raise RefusedMember(f"is a hard link to '{target[:200]}', which is no file before it")
        return name
