"""The storage ``gguf``: GGUF files with no model repository around them, such as ``gguf:///home/me/models``.

Each file that has a language model is a model with the name of the file, and one version. Other GGUF files are left
out: adapters, image encoders, and files of a model that is split.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path

from headrace import ConfigError, InvalidArgument, LoadError, ServerOptions, Storage
from headrace_llamacpp.gguf import read_header

log = logging.getLogger("headrace.llamacpp")

#: Where the backend finds the file.
_PLACE = "1/model.gguf"


class GgufStorage(Storage):
    """The files of a directory, or one file."""

    name = "gguf"

    def __init__(self, url: str, options: ServerOptions) -> None:
        super().__init__(url, options)
        path = url.partition("://")[2]
        if not path:
            raise ConfigError(f"'{url}' does not say where the files are: gguf:///home/me/models does")
        self._path = Path(path).absolute()
        #: For each file, its tag when it was read, and True if it has a model.
        self._read: dict[Path, tuple[Hashable, bool]] = {}

    def models(self) -> Collection[str]:
        if self._path.is_file():
            return (self._path.stem,)  # even if it is none: its load reports why
        if not self._path.is_dir():
            raise InvalidArgument(f"there is no file or directory '{self._path}'")
        return [path.stem for path in sorted(self._path.glob("*.gguf")) if self._has_model(path)]

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        tag = _tag(self._file(model))
        return {} if tag is None else {_PLACE: tag}

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        """Return a hard link to the file. On another file system it is a copy: TMPDIR moves the directory."""
        file = self._file(model).resolve()
        if not file.is_file():
            raise LoadError(f"'{file}' is no regular file")
        target = new_directory() / _PLACE
        target.parent.mkdir()
        try:
            target.hardlink_to(file)
        except OSError as error:
            read_header(file)  # raises if it is damaged: it may announce any size
            log.warning("'%s' is copied to '%s', because it cannot be linked there: %s", file, target, error.strerror)
            shutil.copyfile(file, target)
        return target.parents[1]

    def size(self, model: str, files: Collection[str]) -> int:
        return self._file(model).stat().st_size

    def _file(self, model: str) -> Path:
        return self._path if self._path.is_file() else self._path / f"{model}.gguf"

    def _has_model(self, path: Path) -> bool:
        tag, read = _tag(path), self._read.get(path)
        if read is None or read[0] != tag:
            why = _why_no_model(path)
            if why:
                log.info("'%s' is left out: %s", path, why)
            read = self._read[path] = tag, not why
        return read[1]


def _tag(path: Path) -> Hashable:
    """Return the time and the size of ``path``; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _why_no_model(path: Path) -> str:
    """Return why the file is no model by itself; empty if it is one, or if it is damaged, which its load says."""
    if not path.is_file():
        return "it is no regular file"  # a copy of a device would have no end
    try:
        members = read_header(path).members
    except (LoadError, OSError):
        return ""
    kind = members.get("general.type", "model")
    if kind != "model":
        return f"its general.type is '{kind}'"
    return "it is a part of a model" if members.get("split.count", 0) > 1 else ""
