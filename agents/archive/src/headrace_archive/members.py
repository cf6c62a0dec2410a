"""The rules for members of an archive: their kind, name and size.

Every rule is checked before the member is written. `RefusedArchive` names the broken rule.
"""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace import one_line, why_path_leaves

#: Read and written at once.
CHUNK_BYTES = 1 << 20
#: An archive may always unpack to this size, regardless of its ratio.
_RATIO_FREE_BYTES = 64 << 20
#: The free space to leave on the file system of the temporary directory.
_DISK_FREE_BYTES = 256 << 20
_PART_BYTES, _PATH_BYTES, _DEPTH = 255, 1024, 32


class RefusedArchive(Exception):
    """The archive, or a member of it, breaks a rule."""


class Content(Protocol):
    """The content of a member. It is read once, from its beginning to its end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file or directory of an archive. ``name`` is as the archive has it; ``content`` is None for a directory."""

    name: str
    content: Content | None
    is_executable: bool = False


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """The limits of an unpacked archive: bytes, files and directories, and bytes per byte of the archive."""

    max_bytes: int = 64 << 30
    max_files: int = 10_000
    max_ratio: int = 100


class Budget:
    """Counts what is unpacked of one archive of ``archive_bytes`` to ``target``.

    Raises `RefusedArchive` beyond the limits.
    """

    def __init__(self, limits: ArchiveLimits, archive_bytes: int, target: Path) -> None:
        free = max(shutil.disk_usage(target).free - _DISK_FREE_BYTES, 0)
        by_ratio = max(archive_bytes * limits.max_ratio, _RATIO_FREE_BYTES)
        self._bytes, self._why = min(
            (limits.max_bytes, f"{limits.max_bytes} bytes; parameter 'max_bytes' sets this limit"),
            (by_ratio, f"{limits.max_ratio} times its size; parameter 'max_ratio' sets this limit"),
            (free, f"the {free} bytes that are free for it on this machine"),
        )
        self.max_files = self._files = limits.max_files

    def add_bytes(self, count: int) -> None:
        self._bytes -= count
        if self._bytes < 0:
            raise RefusedArchive(f"it unpacks to more than {self._why}")

    def add_file(self) -> None:
        self._files -= 1
        if self._files < 0:
            raise RefusedArchive(f"it has more than {self.max_files} members; parameter 'max_files' sets this limit")


def path_of(name: str) -> tuple[str, ...]:
    """Return the parts of the member ``name``, none for the top directory. Raises `RefusedArchive`."""
    if why := why_path_leaves(name):
        raise RefusedArchive(f"member '{shown(name)}': {why}")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    why = ""
    if ".." in parts:
        why = "it contains '..'"
    elif not name.isprintable():  # surrogates are what is not UTF-8
        why = "it contains control characters, or is not UTF-8"
    elif len(parts) > _DEPTH:
        why = f"it is more than {_DEPTH} directories deep"
    elif len(name.encode()) > _PATH_BYTES or any(len(part.encode()) > _PART_BYTES for part in parts):
        why = f"it is longer than {_PATH_BYTES} bytes, or a part of it than {_PART_BYTES}"
    if why:
        raise RefusedArchive(f"member '{shown(name)}': {why}")
    return parts


def shown(name: str) -> str:
    """Return ``name`` for a message: one line, at most 100 characters."""
    line = one_line(name)
    return line if len(line) <= 100 else f"{line[:97]}..."


def is_hidden(parts: Iterable[str]) -> bool:
    """True for files that Headrace ignores or that macOS adds to archives."""
    return any(part.startswith(".") or part in ("__pycache__", "__MACOSX") for part in parts)


class NameTable:
    """The files and directories of the unpacked model. Each name is taken once, on any file system."""

    def __init__(self) -> None:
        #: The path, and True for a file, by the case-folded, normalized name.
        self._taken: dict[str, tuple[str, bool]] = {}

    def add(self, parts: tuple[str, ...], *, is_file: bool) -> None:
        """Add a file, or a directory, which may be there already. Raises `RefusedArchive`."""
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            wants_file = is_file and end == len(parts)
            key = unicodedata.normalize("NFC", path).casefold()
            if key not in self._taken:
                self._taken[key] = path, wants_file
                continue
            found, found_file = self._taken[key]
            if found != path:
                raise RefusedArchive(f"'{shown(path)}' and '{shown(found)}' differ in case or Unicode form only")
            if found_file and wants_file:
                raise RefusedArchive(f"'{shown(path)}' is there twice")
            if found_file or wants_file:
                raise RefusedArchive(f"'{shown(path)}' is a file and a directory")
