"""The model repository on disk: which models, which versions (behaviours.md section 5.1)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config.model_config_pb2 import ModelVersionPolicy
from penstock.errors import InvalidArgument, OperatorError

log = logging.getLogger(__name__)

#: Directories of a model that are not versions and deserve no warning.
_NOT_VERSIONS = frozenset(("warmup", "initial_state", "configs"))


@dataclass(frozen=True, slots=True)
class Entry:
    """A model as found on disk. ``paths`` has more than one element if repositories disagree."""

    name: str
    paths: tuple[Path, ...]

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def is_duplicate(self) -> bool:
        return len(self.paths) > 1


class Repository:
    """One or more directories of models."""

    def __init__(self, roots: Iterable[str | Path]) -> None:
        self.roots = tuple(Path(root) for root in roots)

    def scan(self) -> dict[str, Entry]:
        """All models, by name in sorted order. Raises `InvalidArgument` for a root that is no directory."""
        found: dict[str, tuple[Path, ...]] = {}
        for root in self.roots:
            if not root.is_dir():
                raise InvalidArgument(f"failed to stat file {root}: repository path is not a valid directory")
            for path in root.iterdir():
                if path.is_dir() and not path.name.startswith("."):
                    found[path.name] = (*found.get(path.name, ()), path)
        return {name: Entry(name, paths) for name, paths in sorted(found.items())}


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


def select_versions(name: str, policy: ModelVersionPolicy, available: Sequence[int]) -> list[int]:
    """The versions to serve, in ascending order; raises `OperatorError` if there are none."""
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
        raise OperatorError(f"at least one version must be available under the version policy of model '{name}'")
    return selected
