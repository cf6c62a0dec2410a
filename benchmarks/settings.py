"""The settings of the sections."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path


class Missing(Exception):
    """A missing requirement of a section. The message says how to install it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``models`` has the models of ``models.py``; ``yardsticks`` a real Triton and perf_analyzer."""

    runs: int
    seconds: float
    soak_minutes: float
    models: Path
    yardsticks: Path

    def model(self, name: str) -> Path:
        path = self.models / name
        if not path.exists():
            raise Missing(f"model '{name}': python benchmarks/models.py {self.models}")
        return path

    def repository(self, folder: Path, *names: str) -> Path:
        """Return a repository in ``folder`` with only these models."""
        for name in names:
            shutil.copytree(self.model(name), folder / name)
        return folder

    def yardstick(self, name: str) -> Path:
        path = self.yardsticks / name
        if not path.exists():
            raise Missing(f"{name}: python benchmarks/yardsticks.py {self.yardsticks}")
        return path


def need_modules(*names: str) -> None:
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise Missing(f"{', '.join(missing)}: pip install {' '.join(missing)}")


def need_wrk() -> None:
    if shutil.which("wrk") is None:
        raise Missing("wrk: apt-get install wrk")
