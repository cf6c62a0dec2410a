"""Repositories that are directories of this machine: a model is a directory.

All files of a model must be inside the model repository, unless ``--allow-external-links`` is set. A user who may write
to one model's directory must not be able to read other files of the server's user through it. Links that stay inside
are common: a Kubernetes volume consists of them (``config.pbtxt -> ..data/config.pbtxt``), and a repository may be a
link.

Source: docs/spec/behaviours.md section 5.1.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from pathlib import Path

from headrace.config.options import ServerOptions
from headrace.config.regular_files import special_kind
from headrace.errors import InvalidArgument, LoadError
from headrace.storage.base import Storage

log = logging.getLogger(__name__)

#: Files that mark a Python environment. Its links lead to the interpreter that created it.
_ENVIRONMENT = frozenset(("pyvenv.cfg", "conda-meta"))
#: Ignored in fingerprints, like hidden files: Python writes it next to an imported model.
_CACHE = "__pycache__"
_PREFIX = "file://"


class LocalStorage(Storage):
    """A directory of models. ``file:///srv/models`` and ``/srv/models`` are the same."""

    name = "file"
    whole = True

    def __init__(self, url: str, options: ServerOptions) -> None:
        super().__init__(url, options)
        self._root = _path_of(url)
        self._roots = [_path_of(each) for each in options.model_repository if scheme_of(each) == self.name]
        #: The directory that had models at the last scan. If its volume is unmounted, an empty directory is in its
        #: place.
        self._filled: os.stat_result | None = None

    def models(self) -> Collection[str]:
        root = self._root
        try:
            with os.scandir(root) as entries:
                names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
            place = root.stat()
        except PermissionError:
            raise
        except (OSError, ValueError):
            raise InvalidArgument(f"failed to stat file {root}: repository path is not a valid directory") from None
        if self._filled and not names and not os.path.samestat(self._filled, place):
            raise InvalidArgument(
                f"repository path {root} is empty, and is not the directory that had models: is a volume missing?"
            )
        self._filled = place if names else self._filled
        return names

    def fingerprint(self, model: str) -> dict[str, Hashable]:
        return files_below(self._root / model)

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        path = self._root / model
        check_files(path, self._roots, allow_external_links=self.options.allow_external_links)
        return path

    def size(self, model: str, files: Collection[str]) -> int:
        return sum((self._root / model / path).stat().st_size for path in files)


def scheme_of(url: str) -> str:
    """Return the scheme of ``url`` in lower case; ``file`` if it has none."""
    scheme, colon, _ = url.partition("://")
    is_url = colon and scheme.isascii() and scheme.replace("+", "").replace("-", "").replace(".", "").isalnum()
    return scheme.lower() if is_url else LocalStorage.name


def split_name(url: str) -> tuple[str, dict[str, str] | None]:
    """Return the URL of the repository, and the directory of each name that it serves; None for their own names.

    ``file:///mnt/models#digits`` is one model, ``digits``, if that directory is a model. Else it is a repository.
    """
    path, _, name = url.partition("#") if url.startswith(_PREFIX) else (url, "", "")
    root = _path_of(path)
    return (f"{_PREFIX}{root.parent}", {name: root.name}) if name and is_model(root) else (path, None)


def _path_of(url: str) -> Path:
    return Path(url.removeprefix(_PREFIX))


def is_model(path: Path) -> bool:
    """True if ``path`` is the directory of one model: it has a config, or versions that are not models."""
    return path.is_dir() and (
        (path / "config.pbtxt").is_file()
        or any(_is_version(child) and not _has_models(child) for child in path.iterdir())
    )


def _is_version(path: Path) -> bool:
    return path.name.isascii() and path.name.isdigit() and path.is_dir()


def _has_models(path: Path) -> bool:
    """True if ``path``, whose name is that of a version, is a model itself."""
    return (path / "config.pbtxt").is_file() or any(map(_is_version, path.iterdir()))


# ---------------------------------------------------------------------------
# The files of a directory
# ---------------------------------------------------------------------------


def files_below(directory: Path) -> dict[str, Hashable]:
    """Return modification time in ns and size of every file below ``directory``, by path; None for directories.

    Follows links. Files that are removed meanwhile are left out. Each child of ``directory`` is walked separately, so
    that a version that is a link to another has the same files. Blocks.
    """
    files: dict[str, Hashable] = {}
    try:
        top = directory.stat()
    except OSError:
        return files
    for entry in _visible(str(directory)):
        files.update(_walk(entry, len(str(directory)) + 1, {(top.st_dev, top.st_ino)}))
    return files


def _walk(first: os.DirEntry[str], start: int, visited: set[tuple[int, int]]) -> Iterator[tuple[str, Hashable]]:
    """Yield the paths from ``first`` on, without their first ``start`` characters."""
    waiting = [first]
    while waiting:
        entry = waiting.pop()
        try:
            status = entry.stat()
        except OSError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield entry.path[start:], (status.st_mtime_ns, status.st_size)
            continue
        yield f"{entry.path[start:]}/", None
        if (place := (status.st_dev, status.st_ino)) not in visited:  # links may form a circle
            visited.add(place)
            waiting += _visible(entry.path)


def _visible(folder: str) -> list[os.DirEntry[str]]:
    return [entry for entry in _list(folder) if entry.name != _CACHE and not entry.name.startswith(".")]


# ---------------------------------------------------------------------------
# Files that no model may have
# ---------------------------------------------------------------------------


def check_files(model_path: Path, roots: Iterable[str | Path], *, allow_external_links: bool) -> None:
    """Raise `LoadError` for the first file at or below ``model_path`` that no model may have.

    Not allowed are links out of all repositories (unless ``allow_external_links``), FIFOs and devices, which an engine
    would wait for forever. ``roots`` are the other repositories; the model's own is its parent directory. Directories
    behind links are searched, too, once each. Blocks.
    """
    places = (model_path.parent, *roots)
    for path, target, mode in _files(str(model_path)):
        if target and not (allow_external_links or _is_inside(target, places)):
            log.error("model '%s': '%s' is a link to '%s'", model_path.name, path, target)
            raise LoadError(
                f"'{os.path.relpath(path, model_path.parent)}' is a link that leads out of the model repository; "
                "--allow-external-links=true permits it"
            )
        kind = special_kind(mode)
        if kind and not stat.S_ISSOCK(mode):  # opening a socket fails at once
            raise LoadError(
                f"'{os.path.relpath(path, model_path.parent)}' is {kind}: a model consists of regular files and "
                "directories"
            )


def _is_inside(target: str, places: Iterable[str | Path]) -> bool:
    return any(Path(target).is_relative_to(os.path.realpath(place)) for place in places)


def _files(top: str) -> Iterator[tuple[str, str, int]]:
    """Yield the path of every file at or below ``top``, its target if it is a link, and its mode (0 if it does not
    exist).

    Hidden files are included, because they may be links.
    """
    if Path(top).is_symlink():
        yield top, os.path.realpath(top), 0
    visited: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        entries = sorted(_list(waiting.pop()), key=lambda entry: entry.name)
        if not _ENVIRONMENT.isdisjoint(entry.name for entry in entries):
            continue
        for entry in entries:
            real = os.path.realpath(entry.path) if entry.is_symlink() else ""
            try:
                status = entry.stat()
            except OSError:  # a link to nothing
                yield entry.path, real, 0
                continue
            yield entry.path, real, status.st_mode
            if stat.S_ISDIR(status.st_mode) and (place := (status.st_dev, status.st_ino)) not in visited:
                visited.add(place)
                waiting.append(entry.path)


def _list(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # loading the file fails, too, with a better error
        return []
