"""Collects the wheels of distributions and of all that they need, by pip, also for another machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from packaging.utils import parse_wheel_filename

from headrace import ConfigError, InvalidArgument
from headrace_bundle.distribution_choice import DistributionChoice
from headrace_bundle.manifest import digest
from headrace_bundle.progress_line import ShowStep

#: The oldest glibc for which PyPI has wheels of each machine, as the second number of its version (PEP 599, PEP 600).
_OLDEST_GLIBC = {"x86_64": 5}
_OTHERS_OLDEST = 17
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_MANYLINUX = re.compile(r"manylinux_2_(\d+)_(\w+)")
#: Characters of pip's own words in an error.
_MAX = 2000


@dataclass(frozen=True)
class TargetMachine:
    """The machine that shall run the wheels. Without ``platform``, this one."""

    python: str
    platform: str = ""

    @property
    def is_here(self) -> bool:
        return not self.platform and self.has_this_python

    @property
    def has_this_python(self) -> bool:
        return self.python == f"{sys.version_info.major}.{sys.version_info.minor}"

    @property
    def machine(self) -> str:
        """The output of ``uname -m`` there; empty if the platform does not have it."""
        if not self.platform:
            return os.uname().machine
        found = _MANYLINUX.fullmatch(self.platform) or re.fullmatch(r"(manylinux\d+)_(\w+)", self.platform)
        return found[2] if found else ""

    def pip_words(self) -> list[str]:
        """Return the options of pip that choose wheels for it; none if it is this machine."""
        if self.is_here:
            return []
        words = ["--only-binary=:all:", "--implementation=cp", f"--python-version={self.python}"]
        return words + [f"--platform={tag}" for tag in self._tags()]

    def _tags(self) -> list[str]:
        """Return the tags of the wheels that run there. pip takes a tag of PEP 600 for itself only."""
        if not self.platform:
            from packaging.tags import platform_tags

            return list(platform_tags())
        found = _MANYLINUX.fullmatch(self.platform)
        if not found:
            return [self.platform]
        newest, machine = int(found[1]), found[2]
        tags = []
        for number in range(newest, _OLDEST_GLIBC.get(machine, _OTHERS_OLDEST) - 1, -1):
            tags.append(f"manylinux_2_{number}_{machine}")
            if number in _LEGACY:
                tags.append(f"{_LEGACY[number]}_{machine}")
        return [*tags, f"linux_{machine}"]


def collect(
    choice: DistributionChoice,
    target: TargetMachine,
    into: Path,
    requirements: Sequence[Path],
    pinned: bool,
    step: ShowStep,
) -> list[Path]:
    """Write all wheels into the new folder ``into``, and return them. ``requirements`` are files for pip.

    Distributions that were installed from a folder are built. Raises `ConfigError` with pip's words if it fails.
    """
    if find_spec("pip") is None:
        raise ConfigError("pip is not installed in this environment, and collects the wheels: python -m ensurepip")
    for path in requirements:
        if not path.is_file():
            raise InvalidArgument(f"--requirements '{path}' is no file")
    into.mkdir()
    if choice.sources:
        run_pip("wheel", "--no-deps", f"--wheel-dir={into}", *choice.sources, step=step)
    names = ["{}=={}".format(*parse_wheel_filename(path.name)[:2]) for path in into.glob("*.whl")]
    constraints = into.parent / "constraints.txt"
    constraints.write_text("".join(f"{each}\n" for each in choice.constraints) if pinned else "")
    roots = choice.pinned if pinned else [each.partition("==")[0] for each in choice.pinned]
    options = [
        f"--find-links={into}",
        f"--constraint={constraints}",
        *(f"--requirement={path}" for path in requirements),
    ]
    verb = ["wheel", f"--wheel-dir={into}"] if target.is_here else ["download", f"--dest={into}", *target.pip_words()]
    run_pip(*verb, *options, *roots, *names, step=step)
    wheels = sorted(into.glob("*.whl"))
    size = sum(path.stat().st_size for path in wheels)
    step("wheels", f"{len(wheels)}, {size / (1 << 20):,.0f} MiB", is_last=True)
    return wheels


def run_pip(*words: str | Path, step: ShowStep) -> None:
    """Run pip. ``step`` gets its progress. Raises `ConfigError` with pip's output if it fails."""
    command = [sys.executable, "-m", "pip", *map(str, words), "--disable-pip-version-check", "--no-input"]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if found := re.match(r"(Collecting|Processing|Building wheel for|Downloading|Saved) \S+", line.strip()):
                step("wheels", found[0])
    if process.returncode:
        wrong = [line for line in lines if "ERROR" in line] or lines
        raise ConfigError(f"pip {words[0]} failed: {''.join(wrong).strip()[-_MAX:]}")


def pin(wheels: Sequence[Path]) -> None:
    """Write ``requirements.txt`` beside ``wheels``: the version and the checksum of each, which pip compares."""
    lines = []
    for path in wheels:
        name, version, *_ = parse_wheel_filename(path.name)
        with path.open("rb") as file:
            lines.append(f"{name}=={version} --hash={digest(path.name, file)}\n")
    wheels[0].with_name("requirements.txt").write_text("".join(lines))


def publish(folder: Path, output: Path) -> None:
    """Move the folder ``folder`` to ``output``, and replace a former folder of wheels."""
    if output.exists():
        if not output.is_dir() or any(path.suffix not in (".whl", ".txt") for path in output.iterdir()):
            raise InvalidArgument(f"'{output}' is no folder of wheels, and is not replaced")
        shutil.rmtree(output)
    folder.rename(output)
