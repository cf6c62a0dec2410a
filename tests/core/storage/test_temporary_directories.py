from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.errors import InvalidArgument, LoadError
from headrace.storage.temporary_directories import TemporaryDirectories, remove


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def below(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.name != ".lock")


def test_each_model_has_a_directory_that_only_the_servers_user_can_enter(temporary: Path) -> None:
    scratch = TemporaryDirectories()
    first, second = scratch.make("m"), scratch.make("m")
    assert first != second
    assert first.name == second.name == "m"
    for path in (first, *first.parents):
        if path == temporary:
            break
        assert path.stat().st_mode & 0o077 == 0
    scratch.close()


def test_nothing_is_left_behind(temporary: Path) -> None:
    scratch = TemporaryDirectories()
    (scratch.make("m") / "1").mkdir()
    path = scratch.make("n")
    remove(path)
    assert not path.exists()
    scratch.close()
    scratch.close()
    assert below(temporary) == [f"headrace-{os.geteuid()}"]


def test_a_server_that_needs_none_makes_none(temporary: Path) -> None:
    scratch = TemporaryDirectories()
    scratch.sweep()
    scratch.close()
    assert below(temporary) == []


ABANDON = """
import sys, time
from headrace.storage.temporary_directories import TemporaryDirectories
path = TemporaryDirectories().make("m")
(path / "secret").touch()
print(path, flush=True)
time.sleep(100)
"""


def test_directories_of_killed_processes_are_removed_and_those_of_live_ones_are_not() -> None:
    children = [subprocess.Popen([sys.executable, "-c", ABANDON], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        paths = [Path(child.stdout.readline().strip()) for child in children if child.stdout]
        children[0].send_signal(signal.SIGKILL)
        children[0].wait()
        TemporaryDirectories().sweep()
        assert not paths[0].parent.parent.exists()
        assert (paths[1] / "secret").exists()
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_directory_that_somebody_else_could_have_prepared_is_not_used(temporary: Path) -> None:
    prepared = temporary / f"headrace-{os.geteuid()}"
    prepared.mkdir(mode=0o777)
    prepared.chmod(0o777)
    with pytest.raises(LoadError, match="not private"):
        TemporaryDirectories().make("m")
    prepared.rmdir()
    (temporary / "elsewhere").mkdir(mode=0o700)
    prepared.symlink_to(temporary / "elsewhere")
    with pytest.raises(LoadError, match="not private"):
        TemporaryDirectories().make("m")


@pytest.mark.parametrize("name", ["x" * 300, "\ud800"])
def test_an_impossible_directory_name_is_refused_and_leaves_no_files(name: str, temporary: Path) -> None:
    scratch = TemporaryDirectories()
    with pytest.raises(InvalidArgument, match="no directory can be called"):
        scratch.make(name)
    assert len(below(temporary)) == 2
    scratch.close()
