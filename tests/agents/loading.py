"""Loads files by an agent, as a load of a model does."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest

from headrace import HeadraceError, RepositoryAgent


class Loader:
    """``loader(files, **parameters)`` returns the directory with the model, or the error of the agent."""

    def __init__(self, agent: type[RepositoryAgent], folder: Path) -> None:
        self._agent, self._folder, self._numbers = agent, folder, count()

    def __call__(self, files: Mapping[str, bytes], **parameters: str) -> Path | str:
        number = next(self._numbers)
        model = write(self._folder / f"model{number}", files)
        (target := self._folder / f"made{number}").mkdir(mode=0o700)
        try:
            return self._agent("m", parameters).load(model, lambda: target)
        except HeadraceError as error:
            return error.message


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write ``files``, by their paths, to ``directory``. Return it."""
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory


def write_volume(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` as Kubernetes does: each is a link to the one below ``..data``, which is a link."""
    write(directory / "..2026_11_26", files)
    (directory / "..data").symlink_to("..2026_11_26")
    for name in {path.partition("/")[0] for path in files}:
        (directory / name).symlink_to(f"..data/{name}")
    return directory


def files_of(directory: Path | str) -> dict[str, bytes]:
    """Return the contents of the files below ``directory`` by path. Fail if it is an error."""
    assert isinstance(directory, Path), directory
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def lock_directories(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make directories called ``name`` unreadable, also for root."""
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith(f"/{name}"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
