from __future__ import annotations

import hashlib
import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from headrace import compilation

SUFFIX = EXTENSION_SUFFIXES[0]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two modules, of which ``queue`` is compiled and on record."""
    folder = tmp_path / "headrace"
    (folder / "schedulers").mkdir(parents=True)
    for name in ("queue", "kernel"):
        (folder / f"schedulers/{name}.py").write_text(f"{name} = 1\n")
    (folder / f"schedulers/queue{SUFFIX}").touch()
    digest = hashlib.sha256(b"queue = 1\n").hexdigest()
    record = {"compiler": "Cython 9, cc 1", "sources": {"headrace/schedulers/queue.py": digest}}
    (folder / compilation.RECORD).write_text(json.dumps(record))
    return folder


def test_what_is_compiled_is_described(package: Path) -> None:
    assert compilation.describe(package) == "compiled: 1 modules, Cython 9, cc 1"
    assert compilation.complaint(package) == ""


def test_what_another_interpreter_would_take_counts_for_nothing(package: Path) -> None:
    (package / f"schedulers/queue{SUFFIX}").rename(package / "schedulers/queue.cpython-2-none.so")
    assert compilation.describe(package) == "pure Python"
    (package / "schedulers/queue.py").write_text("queue = 2\n")
    assert compilation.complaint(package) == ""


def test_source_that_has_changed_since_is_named(package: Path) -> None:
    (package / "schedulers/queue.py").write_text("queue = 2\n")
    assert compilation.complaint(package).startswith(f"headrace/schedulers/queue.py in {package.parent}: changed since")


def test_a_module_that_nobody_has_recorded_is_named(package: Path) -> None:
    """As one that somebody has left in a tree of source."""
    (package / f"schedulers/kernel{SUFFIX}").touch()
    assert compilation.stale_modules(package) == ["headrace/schedulers/kernel.py"]
    (package / compilation.RECORD).unlink()
    assert len(compilation.stale_modules(package)) == 2
    assert compilation.describe(package) == "compiled: 2 modules, by whom is not known"


def test_a_module_without_its_source_is_never_stale(package: Path) -> None:
    (package / "schedulers/queue.py").unlink()
    assert compilation.complaint(package) == ""


def test_many_are_counted_and_not_listed(package: Path) -> None:
    for number in range(compilation.NAMED + 3):
        (package / f"part{number}.py").touch()
        (package / f"part{number}{SUFFIX}").touch()
    assert " and 3 more in " in compilation.complaint(package)
