"""Which file an error of a load is about, and where in it."""

from __future__ import annotations

from pathlib import Path


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
