"""Changes of files, on a real disk, with a clock that tests turn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import FileChanges


def rewrite(path: Path) -> None:
    """Write other content of the same size, later."""
    before = path.stat().st_mtime_ns
    path.write_text("2")
    os.utime(path, ns=(0, before + 1))


def replace(path: Path) -> None:
    """Put another file of the same size and time in its place."""
    other, before = path.with_name("other"), path.stat().st_mtime_ns
    other.write_text("1")
    os.utime(other, ns=(0, before))
    other.replace(path)


def block(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: list[Callable[[Path], object]] = [rewrite, replace, Path.unlink, block]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found_once(tmp_path: Path, change: Callable[[Path], object]) -> None:
    path, same = tmp_path / "keys", tmp_path / "same"
    path.write_text("1")
    changes = FileChanges(same, str(path))
    assert not changes.found()
    change(path)
    assert changes.found()
    assert not changes.found()
    same.write_text("")
    assert changes.found()


def test_files_are_checked_at_most_once_per_second(tmp_path: Path) -> None:
    times = iter((5.0, 5.0, 5.9, 6.0, 6.5, 6.99, 7.5, 7.6))
    changes = FileChanges(tmp_path / "keys", clock=lambda: next(times))
    due = [changes.are_due() for _ in range(7)]
    assert due == [False, False, True, False, False, True, False]


def test_a_path_that_cannot_be_is_missing() -> None:
    assert not FileChanges("a\0b", "").found()
