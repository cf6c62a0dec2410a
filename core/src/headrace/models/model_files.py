"""The files of a model's directory: whether links keep inside, the labels of outputs, and whether anything changed.

Nothing of a model lies outside the model repository, unless ``--allow-external-links`` says that it may.
Whoever may write into one model's directory must not thereby read, and have served, what the
server's user can read elsewhere. Links that stay inside are everyday: a Kubernetes volume is made
of them (``config.pbtxt -> ..data/config.pbtxt``), and a repository may itself be a link.

A `Fingerprint` is what a directory holds, cheap enough to be looked at often. Label files are those of
docs/spec/behaviours.md section 3.4.
"""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

from headrace.config.confinement import why_outside
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.validation import Problem
from headrace.errors import HeadraceError, LoadError, Unsupported

log = logging.getLogger(__name__)

#: What marks the directory of a Python environment: its links lead to the interpreter that it was made of.
_ENVIRONMENT = frozenset(("pyvenv.cfg", "conda-meta"))


def check_links(model_path: Path, roots: Iterable[str | Path]) -> None:
    """Raise `LoadError` for the first link at or below ``model_path`` that leads out of all repositories.

    ``roots`` are the other repositories; the model's own is the directory that it stands in.
    Looks into directories behind links, once each. Blocks.
    """
    inside = tuple(os.path.realpath(root) for root in (model_path.parent, *roots))
    for link, target in _links(str(model_path)):
        if not any(Path(target).is_relative_to(root) for root in inside):
            log.error("model '%s': '%s' is a link to '%s'", model_path.name, link, target)
            raise LoadError(
                f"'{os.path.relpath(link, model_path.parent)}' is a link that leads out of the model repository; "
                "--allow-external-links=true permits it"
            )


def _links(top: str) -> Iterator[tuple[str, str]]:
    """Every link at or below ``top``, and what is at its end. Hidden files are looked at, too: links hide there."""
    if Path(top).is_symlink():
        yield top, os.path.realpath(top)
    visited = {os.path.realpath(top)}
    waiting = [top]
    while waiting:
        entries = _list(waiting.pop())
        if not _ENVIRONMENT.isdisjoint(entry.name for entry in entries):
            continue
        for entry in entries:
            real = os.path.realpath(entry.path) if entry.is_symlink() else ""
            if real:
                yield entry.path, real
            if Path(entry.path).is_dir() and (place := real or os.path.realpath(entry.path)) not in visited:
                visited.add(place)
                waiting.append(entry.path)


def _list(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:  # a file that cannot be looked at cannot be loaded either, and that error is the better one
        return []


def read_labels(config: ModelConfig, model_path: Path) -> dict[str, list[str]]:
    """The lines of each output's label file, blank lines kept.

    Raises `Unsupported` for a file outside the model directory, `LoadError` for an unreadable one.
    """
    return {
        io.name: _read(config.name, io.name, io.label_filename, model_path) for io in config.output if io.label_filename
    }


def check_labels(config: ModelConfig, model_path: Path) -> Iterator[Problem]:
    """Every file for which `read_labels` would raise, but those whose names the rules for paths refuse."""
    for index, io in enumerate(config.output):
        try:
            if io.label_filename and not why_outside(io.label_filename):
                _read(config.name, io.name, io.label_filename, model_path)
        except HeadraceError as error:
            yield Problem(f"output[{index}].label_filename", error.message, error.code)


def _read(model: str, output: str, filename: str, model_path: Path) -> list[str]:
    path = model_path / posixpath.normpath(filename)  # not through a link and up again
    if why_outside(filename):
        raise Unsupported(
            f"label file path '{filename}' for output '{output}' in model '{model}' is outside model directory"
        )
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read label file '{path}' for output '{output}' of model '{model}': {error}") from error
    return lines if lines[-1] else lines[:-1]


#: What Python writes beside a model that it imports is no change of the model; hidden files neither.
_CACHE = "__pycache__"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A directory, and name, modification time in ns and size of all below it; zeros for directories."""

    path: Path
    files: frozenset[tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class VersionFingerprint:
    """What one version is made of: the config that it is loaded with, and the files that count for it."""

    config: bytes
    files: frozenset[tuple[str, int, int]]


def fingerprint_of_version(fingerprint: Fingerprint, version: int, config: ModelConfig) -> VersionFingerprint:
    """That of ``version``: its own files and those that all versions share.

    What a config file says counts, and not when it was saved; which versions are to be served is no
    part of any of them.
    """
    config = ModelConfig.FromString(config.SerializeToString())
    config.ClearField("version_policy")
    start = len(str(fingerprint.path)) + 1
    files = (file for file in fingerprint.files if _counts(file[0][start:].partition("/")[0], version))
    return VersionFingerprint(config.SerializeToString(deterministic=True), frozenset(files))


def _counts(first: str, version: int) -> bool:
    """Whether what ``first``, right below the model's directory, is or holds is part of ``version``."""
    if first.isdecimal():
        return first == str(version)
    return first not in ("config.pbtxt", "configs")


def take_fingerprint(model_path: Path) -> Fingerprint:
    """The fingerprint of now. Follows links; what vanishes meanwhile is left out. Blocks."""
    return Fingerprint(model_path, frozenset(_walk(model_path)))


def _walk(top: Path) -> Iterator[tuple[str, int, int]]:
    visited: set[tuple[int, int]] = set()
    waiting = [str(top)]
    while waiting:
        for entry in _visible(waiting.pop()):
            try:
                stat = entry.stat()
            except OSError:
                continue
            if not S_ISDIR(stat.st_mode):
                yield entry.path, stat.st_mtime_ns, stat.st_size
            elif (place := (stat.st_dev, stat.st_ino)) not in visited:  # links may go in circles
                visited.add(place)
                waiting.append(entry.path)
                yield entry.path, 0, 0


def _visible(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.name != _CACHE and not entry.name.startswith(".")]
    except OSError:
        return []
