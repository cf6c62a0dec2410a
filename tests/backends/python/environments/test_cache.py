"""An environment is created once, completely, or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.errors import LoadError
from headrace_python.cache import cached

MAKE_AND_HANG = """
import sys, time
from headrace_python.cache import cached
def make(into):
    into.mkdir()
    (into / "half").touch()
    print("making", flush=True)
    time.sleep(100)
cached(sys.argv[1], make)
"""


def make(into: Path) -> None:
    into.mkdir()
    (into / "made").touch()


def never(into: Path) -> None:
    raise AssertionError("it is there already")


def test_an_environment_is_created_once(cache: Path) -> None:
    assert cached("a", make) == cache / "environments/a/env"
    assert (cached("a", never) / "made").exists()


def test_two_loads_at_once_make_it_once(cache: Path) -> None:
    made: list[Path] = []
    is_making, may_end = threading.Event(), threading.Event()

    def slowly(into: Path) -> None:
        made.append(into)
        is_making.set()
        assert may_end.wait(30)
        make(into)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cached, "a", slowly)
        assert is_making.wait(30)
        second = threads.submit(cached, "a", slowly)
        may_end.set()
        assert first.result(30) == second.result(30)
    assert len(made) == 1


def test_a_failure_removes_its_files_and_the_next_attempt_starts_anew(cache: Path) -> None:
    def fail(into: Path) -> None:
        make(into)
        (into / "made").parent.chmod(0o500)
        raise LoadError("lost")

    with pytest.raises(LoadError, match="lost"):
        cached("a", fail)
    assert not (cache / "environments/a/env").exists()
    assert (cached("a", make) / "made").exists()


def test_incomplete_environments_are_removed(cache: Path, wait_until: Callable[..., None]) -> None:
    with subprocess.Popen([sys.executable, "-c", MAKE_AND_HANG, "a"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"making\n"
        cached("b", make)
        assert (cache / "environments/a/env/half").exists()  # it lives: its work is left alone
        server.send_signal(signal.SIGKILL)
    cached("c", make)
    assert not (cache / "environments/a/env").exists()
    assert (cached("a", make) / "made").exists()


def test_a_cache_that_others_may_write_is_refused(cache: Path) -> None:
    (cache / "environments").mkdir(parents=True)
    (cache / "environments").chmod(0o770)
    with pytest.raises(LoadError, match="must belong to the server's user"):
        cached("a", make)


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(LoadError, match="Not a directory; HEADRACE_CACHE may name another directory"):
        cached("a", make)


def test_without_a_variable_the_cache_is_in_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cached("a", make) == tmp_path / ".cache/headrace/environments/a/env"
    assert (tmp_path / ".cache/headrace/environments").stat().st_mode & 0o777 == 0o700
