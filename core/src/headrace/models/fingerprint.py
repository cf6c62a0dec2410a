"""What a model's directory holds, cheap enough to be looked at often: did it change since?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

from headrace.config.model_config_pb2 import ModelConfig

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


def take(model_path: Path) -> Fingerprint:
    """The fingerprint of now. Follows links; what vanishes meanwhile is left out. Blocks."""
    return Fingerprint(model_path, frozenset(_walk(model_path)))


def _walk(top: Path) -> Iterator[tuple[str, int, int]]:
    visited: set[tuple[int, int]] = set()
    waiting = [str(top)]
    while waiting:
        for entry in _list(waiting.pop()):
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


def _list(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.name != _CACHE and not entry.name.startswith(".")]
    except OSError:
        return []
