from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config.options import ServerOptions
from headrace.models.control import read_fingerprints
from headrace.plugins import Plugins
from headrace.storage.local_storage import files_below
from headrace.storage.repositories import Repositories


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m"
    (path / "1" / "deep").mkdir(parents=True)
    (path / "config.pbtxt").write_text("a")
    (path / "1" / "deep" / "weights").write_text("b")
    return path


def same_time(path: Path, text: str) -> None:
    before = path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=(before, before))


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file written again": lambda model: os.utime(model / "1" / "deep" / "weights", ns=(1, 1)),
    "another size at the same time": lambda model: same_time(model / "config.pbtxt", "longer"),
    "a new file": lambda model: (model / "1" / "new").touch(),
    "an empty version": lambda model: (model / "2").mkdir(),
    "a file gone": lambda model: (model / "config.pbtxt").unlink(),
    "a file renamed": lambda model: (model / "config.pbtxt").rename(model / "config.pbtxt.old"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(model: Path, change: str) -> None:
    before = files_below(model)
    CHANGES[change](model)
    assert files_below(model) != before


UNIMPORTANT: dict[str, Callable[[Path], object]] = {
    "nothing": lambda model: None,
    "what python caches": lambda model: (model / "1" / "__pycache__").mkdir(),
    "an editor's hidden file": lambda model: (model / "1" / ".model.py.swp").touch(),
    "the access time": lambda model: (model / "config.pbtxt").read_bytes(),
}


@pytest.mark.parametrize("event", UNIMPORTANT)
def test_fingerprint_is_the_same_without_a_change(model: Path, event: str) -> None:
    before = files_below(model)
    UNIMPORTANT[event](model)
    assert files_below(model) == before


def test_links_in_a_circle_end(model: Path) -> None:
    (model / "1" / "loop").symlink_to(model)
    assert len(files_below(model)) < 20


def test_target_of_a_link_counts(model: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("x")
    (model / "1" / "weights").symlink_to(tmp_path / "shared")
    before = files_below(model)
    (tmp_path / "shared").write_text("longer")
    assert files_below(model) != before


def test_a_removed_model_has_no_files(tmp_path: Path) -> None:
    assert files_below(tmp_path / "nowhere") == {}


def test_each_directory_is_listed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    scandir = os.scandir

    def scan(folder: str) -> object:
        listed.append(folder)
        return scandir(folder)

    monkeypatch.setattr("headrace.storage.local_storage.os.scandir", scan)
    files_below(model)
    assert sorted(listed) == [str(model), str(model / "1"), str(model / "1" / "deep")]


def test_an_unchanged_repository_is_polled_in_a_moment(tmp_path: Path) -> None:
    """`benchmarks/many_models.py` measures 2,000 models, for which 500 ms of CPU are wanted."""
    for number in range(500):
        (tmp_path / f"m{number}" / "1").mkdir(parents=True)
        (tmp_path / f"m{number}" / "config.pbtxt").touch()
        (tmp_path / f"m{number}" / "1" / "model.onnx").touch()
    options = ServerOptions(model_repository=(str(tmp_path),))
    repositories = Repositories(options, Plugins.discover(()).storages)
    before = read_fingerprints(repositories)
    began = time.process_time()
    assert read_fingerprints(repositories) == before
    assert time.process_time() - began < 0.125
    assert len(before) == 500
