"""What ``headrace check`` has found out about one model, and which file an error of a load is about."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.completed_fields import CompletedField


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """What is wrong, and where.

    ``line`` and ``column`` count from 1, and are 0 where the place is not known, or not in the file.
    ``field`` is a path in the config, empty if none is at fault; ``code`` is the printed name of an error code.
    """

    file: str
    line: int
    column: int
    field: str
    message: str
    code: str

    def __str__(self) -> str:
        place = "".join(f":{number}" for number in (self.line, self.column) if number)
        field = f"{self.field}: " if self.field and not self.message.startswith(self.field) else ""
        return f"{self.file}{place}: {field}{self.message}"


@dataclass(slots=True)
class ModelReport:
    """What is wrong with a model, and which fields were filled in, by whom.

    ``path`` is the config file, or the model's directory if there is none.
    """

    model: str
    path: str
    problems: list[Diagnostic] = field(default_factory=list)
    completed: list[CompletedField] = field(default_factory=list)


def locate(message: str, model_path: Path, version: int, filename: str) -> tuple[Path, int]:
    """The file of the model that ``message`` speaks of, and the line in it; 0 for none.

    A Python error names both; what else a backend says is about the version's ``filename``.
    """
    folder = model_path / str(version)
    for name, line in (_of_frame(message), _of_syntax(message)):
        for place in (model_path / name, folder / name) if name else ():
            if place.is_file():
                return place, line
    return (folder / filename if filename and (folder / filename).exists() else folder), 0


def _of_syntax(message: str) -> tuple[str, int]:
    """``SyntaxError: invalid syntax (model.py, line 3)``"""
    _, _, inside = message.splitlines()[0].rpartition("(") if message else ("", "", "")
    name, _, line = inside.removesuffix(")").partition(", line ")
    return _known(name, line)


def _of_frame(message: str) -> tuple[str, int]:
    """The innermost frame, which stands first: ``  1/model.py(3): initialize``, after a line ``At:``"""
    _, _, frames = message.partition("\nAt:\n")
    name, _, rest = frames.strip().partition("(")
    return _known(name, rest.partition(")")[0])


def _known(name: str, line: str) -> tuple[str, int]:
    is_place = name and "\0" not in name and line.isascii() and line.isdigit() and len(line) < 9
    return (name, int(line)) if is_place else ("", 0)
