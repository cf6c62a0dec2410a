"""The versions of a model: which exist, which are served, and whether one has changed.

Source: docs/spec/behaviours.md section 5.1.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.config.model_config_pb2 import ModelConfig, ModelVersionPolicy
from headrace.config.path_checks import one_line
from headrace.errors import OperatorError

log = logging.getLogger(__name__)

#: Directories of a model that are not versions and cause no warning.
_NOT_VERSIONS = frozenset(("warmup", "initial_state", "configs"))


class NoVersion(OperatorError):
    """A model has no version that its policy selects."""


def available_versions(files: Iterable[str]) -> list[int]:
    """Return the versions among the paths of a model, ascending. Other directories cause a warning."""
    versions = []
    for name in _directories(files):
        if not (name.isascii() and name.isdigit()):
            log.warning("ignore version directory '%s' which fails to convert to integral number", name)
        elif name.startswith("0") and name != "0":
            log.warning("ignore version directory '%s' which contains leading zeros in its directory name", name)
        else:
            versions.append(int(name))
    return sorted(versions)


def _directories(files: Iterable[str]) -> list[str]:
    """Return the names of the directories of a model that could be versions, in order."""
    names = {first for first, slash, _ in (path.partition("/") for path in files) if slash}
    return sorted(name for name in names - _NOT_VERSIONS if not name.startswith("."))


def versions_to_serve(name: str, files: Collection[str], policy: ModelVersionPolicy) -> list[int]:
    """Return the versions to serve of a model with ``files``, ascending.

    Raises `NoVersion`, with the cause, if there are none.
    """
    available = available_versions(files)
    try:
        return select_versions(name, policy, available)
    except NoVersion as error:
        raise NoVersion(f"{error.message}. {_why_none(files, policy, available)}") from None


def _why_none(files: Iterable[str], policy: ModelVersionPolicy, available: Sequence[int]) -> str:
    """Return a sentence on what a model without a version to serve has instead."""
    if available:
        versions = ", ".join(map(str, policy.specific.versions))
        return f"It has version {', '.join(map(str, available))}, and its version policy asks for {versions}"
    if ignored := _directories(files):
        name = one_line(ignored[0])
        return f"Its directory '{name}' is no version: a version is a number without leading zeros, such as '1'"
    return "It has no version directory, such as '1', which holds the model's files, and is empty for an ensemble"


def select_versions(name: str, policy: ModelVersionPolicy, available: Sequence[int]) -> list[int]:
    """Return the versions to serve, ascending. Raises `NoVersion` if there are none."""
    if policy.HasField("all"):
        selected = list(available)
    elif policy.HasField("specific"):
        selected_by_policy = set(policy.specific.versions)
        for version in sorted(selected_by_policy.difference(available)):
            log.error("version %d is specified for model '%s', but the version directory is not present", version, name)
        selected = [version for version in available if version in selected_by_policy]
    else:
        number = policy.latest.num_versions or 1
        selected = list(available[-number:])
    if not selected:
        raise NoVersion(f"at least one version must be available under the version policy of model '{name}'")
    return selected


# ---------------------------------------------------------------------------
# Comparison with the loaded version
# ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionFingerprint:
    """Identifies the content of one version: its config without instance groups, its repository, and its files."""

    config: bytes
    place: str
    files: Mapping[str, Hashable]
    instance_groups: bytes = b""

    def differs_in_instances(self, other: VersionFingerprint | None) -> bool:
        """True if ``other`` differs in instances only."""
        return other is not None and self != other and replace(self, instance_groups=other.instance_groups) == other


def fingerprint_of_version(
    place: str, files: Mapping[str, Hashable], version: int, config: ModelConfig, *, is_whole: bool = False
) -> VersionFingerprint:
    """Return the fingerprint of ``version`` of a model with ``files``; if ``is_whole``, all of them count.

    The content of the config file counts, not its time. The version policy does not count.
    """
    config = ModelConfig.FromString(config.SerializeToString())
    config.ClearField("version_policy")
    groups = ModelConfig(instance_group=config.instance_group).SerializeToString(deterministic=True)
    config.ClearField("instance_group")
    paths = files if is_whole else files_of(files, version)
    counting = {path: files[path] for path in paths if not _is_config(path)}
    return VersionFingerprint(config.SerializeToString(deterministic=True), place, counting, groups)


def files_of(files: Iterable[str], version: int | None = None) -> list[str]:
    """Return the paths among ``files`` of ``version``, and of files that all versions share."""
    directory = "" if version is None else str(version)
    return [path for path in files if not (first := path.partition("/")[0]).isdecimal() or first == directory]


def _is_config(path: str) -> bool:
    return path.partition("/")[0] in ("config.pbtxt", "configs")
