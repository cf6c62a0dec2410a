"""Unpacks the archive of a model by the parameters of the agent."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

from headrace import ConfigError, LoadError, one_line, open_regular, why_path_leaves
from headrace_archive.members import (
    CHUNK_BYTES,
    ArchiveLimits,
    ArchiveMember,
    Budget,
    Content,
    NameTable,
    RefusedArchive,
    is_hidden,
    path_of,
    shown,
)
from headrace_archive.tar_archives import Unzstandard, gunzipped, plain, read_tar
from headrace_archive.torchserve import TorchServeArchive, read_manifest
from headrace_archive.zip_archives import read_zip

log = logging.getLogger(__name__)

#: Yields the members of an archive.
Reader: TypeAlias = "Callable[[BinaryIO, Budget], Iterator[ArchiveMember]]"

MAR = ".mar"
READERS: Mapping[str, Reader] = {
    ".tar": partial(read_tar, inflate=plain),
    ".tar.gz": partial(read_tar, inflate=gunzipped),
    ".tgz": partial(read_tar, inflate=gunzipped),
    ".tar.zst": partial(read_tar, inflate=Unzstandard),
    ".zip": read_zip,
    MAR: read_zip,
}
_CONFIG = "config.pbtxt"
_LIMITS = tuple(field.name for field in fields(ArchiveLimits))
_KNOWN = ("archive", "config", "into", "strip_components", *_LIMITS)
#: Errors of the standard library's readers for a damaged archive, besides `OSError`.
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, ValueError, ArithmeticError, LookupError, NotImplementedError),
)


@dataclass(frozen=True, slots=True)
class ArchiveSettings:
    """The parameters.

    - ``archive``: the path of the archive in the model's directory (default: the only one).
    - ``into``: the directory of the unpacked model for the members (default for a ``.mar``: ``1``).
    - ``strip_components``: the number of leading directories to remove from each member, as in ``tar``.
    - ``config``: the ``config.pbtxt`` to use if there are two: ``archive`` or ``repository``.
    """

    archive: str
    into: str
    strip_components: int
    config: str
    limits: ArchiveLimits

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> ArchiveSettings:
        """Raises `ConfigError`."""
        for key in sorted(parameters.keys() - set(_KNOWN)):
            raise ConfigError(f"parameter '{one_line(key)}' is not known: expected {', '.join(_KNOWN)}")
        for key in ("archive", "into"):
            if why := why_path_leaves(parameters.get(key, "")):
                raise ConfigError(f"parameter '{key}' is '{shown(parameters[key])}': {why}")
        archive = parameters.get("archive", "")
        if archive and not suffix_of(archive):
            raise ConfigError(f"parameter 'archive' is '{shown(archive)}', expected a name with {', '.join(READERS)}")
        config = parameters.get("config", "")
        if config not in ("", "archive", "repository"):
            raise ConfigError(f"parameter 'config' is '{shown(config)}', expected 'archive' or 'repository'")
        limits = ArchiveLimits(**{key: _whole(parameters, key, 1) for key in _LIMITS if key in parameters})
        strip = _whole(parameters, "strip_components", 0) if "strip_components" in parameters else 0
        return cls(archive, parameters.get("into", ""), strip, config, limits)


def suffix_of(name: str) -> str:
    """Return the suffix of ``name`` if it is one of an archive, or empty."""
    return next((suffix for suffix in READERS if name.lower().endswith(suffix)), "")


def unpack(settings: ArchiveSettings, who: str, directory: Path, new_directory: Callable[[], Path]) -> Path:
    """Unpack the archive in ``directory``, and copy the other files, to a new directory. Return it.

    Raises `LoadError`, which begins with ``who``.
    """
    archive = _find(settings, who, directory)
    unpacked = new_directory()
    try:
        names = _copy_others(settings, directory, archive, unpacked)
        with open_regular(directory / archive) as source:
            _Unpacking(settings, who, archive, names, unpacked).run(source)
    except RefusedArchive as error:
        raise LoadError(f"{who}: '{shown(archive)}' is not unpacked: {error}") from error
    except OSError as error:  # also for damaged gzip data
        reason = error.strerror or str(error)
        raise LoadError(f"{who}: '{shown(archive)}' cannot be unpacked: {reason}") from error
    return unpacked


def _find(settings: ArchiveSettings, who: str, directory: Path) -> str:
    """Return the path of the archive. Raises `LoadError` unless there is exactly one."""
    if settings.archive:
        return settings.archive
    found = sorted(entry.name for entry in os.scandir(directory) if suffix_of(entry.name) and entry.name[0] != ".")
    if len(found) != 1:
        listed = f"several: {', '.join(map(one_line, found))}; name one by parameter 'archive'" if found else "none"
        raise LoadError(f"{who}: the model must have one archive ({', '.join(READERS)}), and has {listed}")
    return found[0]


def _copy_others(settings: ArchiveSettings, directory: Path, archive: str, unpacked: Path) -> NameTable:
    """Copy the visible files beside the archive. Return their names. Raises `RefusedArchive`."""
    names, packed = NameTable(), os.path.normpath(archive)
    for folder, folders, files in os.walk(directory, onerror=_fail):
        below = Path(folder).relative_to(directory)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        folders[:] = sorted(name for name in folders if not is_hidden((name,)) and name not in links)
        names.add(below.parts, is_file=False)
        (unpacked / below).mkdir(mode=0o700, exist_ok=True)
        for name in sorted([*files, *links]):
            path = below / name
            if is_hidden((name,)) or str(path) == packed:
                continue
            if path.parts != (_CONFIG,) or not settings.config:
                names.add(path.parts, is_file=True)
            with open_regular(directory / path) as source, _create(unpacked / path, _may_execute(source)) as target:
                shutil.copyfileobj(source, target)
    return names


class _Unpacking:
    """Unpacks one archive to ``target``, which has files of ``names`` already."""

    def __init__(self, settings: ArchiveSettings, who: str, archive: str, names: NameTable, target: Path) -> None:
        self._settings, self._who, self._archive, self._names, self._target = settings, who, archive, names, target
        self._suffix = suffix_of(archive)
        into = settings.into or ("1" if self._suffix == MAR else "")
        self._into = path_of(into)
        self._mar: TorchServeArchive | None = None
        self._hidden = 0

    def run(self, source: BinaryIO) -> None:
        """Raises `RefusedArchive` and `OSError`."""
        try:
            if self._suffix == MAR:
                self._mar = read_manifest(self._members(source))
                source.seek(0)
            seen = {name for member in self._members(source) if (name := self._add(member))}
        except _DAMAGED as error:
            raise RefusedArchive(f"it is damaged: {one_line(str(error))}") from error
        if not seen:
            raise RefusedArchive("it has no file")
        if self._mar is not None:
            self._mar.explain(seen, self._who, "/".join(self._into))
        if self._hidden:
            log.info("%s: %d hidden files are left out", self._who, self._hidden)

    def _members(self, source: BinaryIO) -> Iterator[ArchiveMember]:
        budget = Budget(self._settings.limits, os.fstat(source.fileno()).st_size, self._target)
        return READERS[self._suffix](source, budget)

    def _add(self, member: ArchiveMember) -> str:
        """Write ``member``, unless it is left out. Return its name if it is a file. Raises `RefusedArchive`."""
        parts = self._stripped(path_of(member.name), member)
        if is_hidden(parts):
            self._hidden += 1
            return ""
        name = "/".join(parts)
        if member.content is None:
            self._take((*self._into, *parts), is_file=False)
            self._target.joinpath(*self._into, *parts).mkdir(mode=0o700, parents=True, exist_ok=True)
            return ""
        new = name if self._mar is None else self._mar.name_of(name)
        if new is not None:
            self._write((*self._into, *path_of(new)), member.content, member.is_executable)
        return name

    def _write(self, parts: tuple[str, ...], content: Content, is_executable: bool) -> None:
        """Write the file ``parts``. Raises `RefusedArchive`."""
        path = self._target.joinpath(*parts)
        if parts == (_CONFIG,) and self._settings.config:
            if self._settings.config == "repository":
                return
            path.unlink(missing_ok=True)
        self._take(parts, is_file=True)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _create(path, is_executable) as file:
            while chunk := content.read(CHUNK_BYTES):
                file.write(chunk)

    def _stripped(self, parts: tuple[str, ...], member: ArchiveMember) -> tuple[str, ...]:
        """Return ``parts`` without the first ``strip_components`` directories."""
        strip = self._settings.strip_components
        if member.content is not None and len(parts) <= strip:
            raise RefusedArchive(
                f"member '{shown(member.name)}' has no name below {strip} directories ('strip_components')"
            )
        return parts[strip:]

    def _take(self, parts: tuple[str, ...], *, is_file: bool) -> None:
        try:
            self._names.add(parts, is_file=is_file)
        except RefusedArchive as error:
            if parts == (_CONFIG,):
                raise RefusedArchive(
                    f"{_CONFIG} is in it and beside it: parameter 'config' must say which one is used, 'archive' or "
                    "'repository'"
                ) from error
            raise


def _whole(parameters: Mapping[str, str], key: str, minimum: int) -> int:
    text = parameters[key]
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) >= minimum:
        return int(text)
    raise ConfigError(f"parameter '{key}' is '{shown(text)}', expected a whole number from {minimum} on")


def _fail(error: OSError) -> None:
    """Fail for a directory that cannot be read, instead of leaving it out."""
    raise error


def _may_execute(source: BinaryIO) -> bool:
    return bool(os.fstat(source.fileno()).st_mode & 0o100)


def _create(path: Path, is_executable: bool) -> BinaryIO:
    """Create the new file ``path``, for this user only, and open it for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o700 if is_executable else 0o600), "wb")
