"""What the sections need to know."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path


class Missing(Exception):
    """Something that a section cannot do without; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``models`` holds what ``models.py`` wrote; ``yardsticks`` a real Triton and perf_analyzer."""

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
        """A repository in ``folder`` of only these models."""
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
