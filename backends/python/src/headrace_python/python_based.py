"""Python-based backends: a directory with a ``model.py`` that serves every model of that backend.

Source: docs/spec/behaviours.md section 10.7. ``--backend-directory`` holds the directories, each of the name
that configs give as ``backend``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, cast

from headrace import Model
from headrace_python.backend import PythonBackend
from headrace_python.model_source import BACKENDS, RUNTIME


class PythonBasedBackend(PythonBackend):
    """The backend in ``directory``, of the class's ``name``; ``python`` are the settings of that backend."""

    has_runtimes: ClassVar[bool] = True
    directory: ClassVar[Path]
    python: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def location(cls) -> str:
        return str(cls.directory / cls.name)

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__({**self.python, **options, BACKENDS: str(self.directory)})

    def environment_of(self, model: Model) -> str:
        """The model's own, or else the archive that the backend brings along."""
        packed = self.directory / self.name / f"pb_exec_env_{model.config.runtime or RUNTIME}.tar.gz"
        return super().environment_of(model) or (str(packed) if packed.is_file() else "")


def find_python_based(name: str, directory: Path, python: Mapping[str, str]) -> type[PythonBasedBackend] | None:
    """The backend of the directory ``name`` in ``directory``, or None if that has no Python file."""
    folder = directory / name
    if folder.parent != directory or not any(folder.glob("*.py")):
        return None
    members = {"name": name, "directory": directory.absolute(), "python": python, "__doc__": PythonBasedBackend.__doc__}
    return cast("type[PythonBasedBackend]", type("PythonBasedBackend", (PythonBasedBackend,), members))
