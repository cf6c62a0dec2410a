"""The model repository on disk: which models, which versions, and whether anything of one has changed.

Source: docs/spec/behaviours.md section 5.1. A `Fingerprint` is what a model's directory holds, cheap enough to be
looked at often.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR

from headrace.config.confinement import one_line
from headrace.config.model_config_pb2 import ModelConfig, ModelVersionPolicy
from headrace.errors import InvalidArgument, OperatorError

log = logging.getLogger(__name__)

#: Directories of a model that are not versions and deserve no warning.
_NOT_VERSIONS = frozenset(("warmup", "initial_state", "configs"))
#: What Python writes beside a model that it imports is no change of the model; hidden files neither.
_CACHE = "__pycache__"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model as found on disk. ``paths`` has more than one element if repositories disagree.

    ``config`` takes the place of its config file. One that ``is_temporary`` was made for one load,
    by `TemporaryDirectories`, and goes with it.
    """

    name: str
    paths: tuple[Path, ...]
    config: ModelConfig | None = None
    is_temporary: bool = False

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def is_sent(self) -> bool:
        """Whether the config, or all of the model, came with a load request."""
        return self.config is not None or self.is_temporary

    def hide(self, text: str) -> str:
        """``text`` for clients: where a private directory is, is nobody's business."""
        return text.replace(str(self.path), self.name) if self.is_temporary else text

    @property
    def is_duplicate(self) -> bool:
        return len(self.paths) > 1


class Repository:
    """One or more directories of models."""

    def __init__(self, roots: Iterable[str | Path]) -> None:
        self._given = tuple(map(str, roots))
        self.roots = tuple(map(Path, self._given))

    def scan(self) -> dict[str, Entry]:
        """All models, by name in sorted order. Raises `InvalidArgument` for a root that is no directory."""
        found: dict[str, tuple[Path, ...]] = {}
        for path in self._children():
            if _is_entry(path):
                found[path.name] = (*found.get(path.name, ()), path)
        return {name: Entry(name, paths) for name, paths in sorted(found.items())}

    def find(self, name: str) -> Entry | None:
        """The model called ``name``, whatever that is: it is compared and never made part of a path."""
        paths = tuple(path for path in self._children() if path.name == name and _is_entry(path))
        return Entry(name, paths) if paths else None

    def _children(self) -> Iterator[Path]:
        for given, root in zip(self._given, self.roots, strict=True):
            if "://" in given:
                raise InvalidArgument(
                    f"repository path '{given}' is not on this machine: this version reads directories only; copy the "
                    "repository into one, or mount it"
                )
            if not _is_directory(root):
                raise InvalidArgument(f"failed to stat file {root}: repository path is not a valid directory")
            yield from root.iterdir()


def _is_directory(path: Path) -> bool:
    """True if ``path`` is a directory; a path too long for the system is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


class NoVersion(OperatorError):
    """A model has no version that its policy selects."""


def _is_entry(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def is_model(path: Path) -> bool:
    """Whether the directory ``path`` is that of one model: it has a config, or versions that are no models."""
    if not path.is_dir():
        return False
    if (path / "config.pbtxt").is_file():
        return True
    return any(_is_version(child) and not _has_models(child) for child in path.iterdir())


def _is_version(path: Path) -> bool:
    return path.name.isascii() and path.name.isdigit() and path.is_dir()


def _has_models(path: Path) -> bool:
    """Whether ``path``, which is called as versions are, is a model itself."""
    return (path / "config.pbtxt").is_file() or any(map(_is_version, path.iterdir()))


def available_versions(model_path: Path) -> list[int]:
    """The version directories of a model, in ascending order; other directories get a warning."""
    versions = []
    for path in sorted(model_path.iterdir()):
        name = path.name
        if not path.is_dir() or name in _NOT_VERSIONS or name.startswith("."):
            continue
        if not (name.isascii() and name.isdigit()):
            log.warning("ignore version directory '%s' which fails to convert to integral number", name)
        elif name.startswith("0") and name != "0":
            log.warning("ignore version directory '%s' which contains leading zeros in its directory name", name)
        else:
            versions.append(int(name))
    return sorted(versions)


def versions_to_serve(name: str, model_path: Path, policy: ModelVersionPolicy) -> list[int]:
    """The versions of the model at ``model_path`` to serve, in ascending order; raises `NoVersion`, with the cause, if
    there are none."""
    available = available_versions(model_path)
    try:
        return select_versions(name, policy, available)
    except NoVersion as error:
        raise NoVersion(f"{error.message}. {_why_none(model_path, policy, available)}") from None


def _why_none(model_path: Path, policy: ModelVersionPolicy, available: Sequence[int]) -> str:
    """A sentence on what a model without a version to serve has instead."""
    if available:
        wanted = ", ".join(map(str, policy.specific.versions))
        return f"It has version {', '.join(map(str, available))}, and its version policy asks for {wanted}"
    ignored = sorted(path.name for path in model_path.iterdir() if _is_entry(path) and path.name not in _NOT_VERSIONS)
    if ignored:
        name = one_line(ignored[0])
        return f"Its directory '{name}' is no version: a version is a number without leading zeros, such as '1'"
    return "It has no version directory, such as '1', which holds the model's files, and is empty for an ensemble"


def select_versions(name: str, policy: ModelVersionPolicy, available: Sequence[int]) -> list[int]:
    """The versions to serve, in ascending order; raises `NoVersion` if there are none."""
    if policy.HasField("all"):
        selected = list(available)
    elif policy.HasField("specific"):
        wanted = set(policy.specific.versions)
        for version in sorted(wanted.difference(available)):
            log.error("version %d is specified for model '%s', but the version directory is not present", version, name)
        selected = [version for version in available if version in wanted]
    else:
        number = policy.latest.num_versions or 1
        selected = list(available[-number:])
    if not selected:
        raise NoVersion(f"at least one version must be available under the version policy of model '{name}'")
    return selected


# ---------------------------------------------------------------------------
# Whether anything has changed
# ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A directory, and name, modification time in ns and size of all below it; zeros for directories."""

    path: Path
    files: frozenset[tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class VersionFingerprint:
    """What one version is made of: the config that it is loaded with, apart from its instance groups, and the files
    that count for it."""

    config: bytes
    files: frozenset[tuple[str, int, int]]
    instance_groups: bytes = b""

    def differs_in_instances(self, other: VersionFingerprint | None) -> bool:
        """Whether ``other`` says the same of everything but instances."""
        return other is not None and self != other and replace(self, instance_groups=other.instance_groups) == other


def fingerprint_of_version(fingerprint: Fingerprint, version: int, config: ModelConfig) -> VersionFingerprint:
    """That of ``version``: its own files and those that all versions share.

    What a config file says counts, and not when it was saved; which versions are to be served is no
    part of any of them.
    """
    config = ModelConfig.FromString(config.SerializeToString())
    config.ClearField("version_policy")
    groups = ModelConfig(instance_group=config.instance_group).SerializeToString(deterministic=True)
    config.ClearField("instance_group")
    start = len(str(fingerprint.path)) + 1
    files = (file for file in fingerprint.files if _counts(file[0][start:].partition("/")[0], version))
    return VersionFingerprint(config.SerializeToString(deterministic=True), frozenset(files), groups)


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
