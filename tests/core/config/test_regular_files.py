"""Files of models are opened only if they are regular files, and opening never blocks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace import LoadError, Model, ModelConfig, in_memory, open_regular, read_regular
from headrace.errors import HeadraceError
from headrace.storage.local_storage import check_files


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS = {"a FIFO": make_fifo, "a socket": make_socket, "a character device": make_device}


@pytest.fixture(params=list(KINDS))
def special(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """Return a file that is not regular, and its kind."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    path = tmp_path / "m" / "1" / "w"
    KINDS[request.param](path)
    return path, request.param


@pytest.mark.timeout(20)
def test_file_that_is_not_regular_is_refused_without_waiting(special: tuple[Path, str]) -> None:
    path, kind = special
    for read in (open_regular, read_regular, lambda path: in_memory(path).__enter__()):
        with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
            read(path)
    model = Model("m", 1, path.parent, ModelConfig())
    with pytest.raises(LoadError, match=f"'{path}' of model 'm' is {kind}, not a regular file"):
        model.file("w")


@pytest.mark.timeout(20)
def test_a_file_that_becomes_a_fifo_after_its_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = tmp_path / "w", os.stat
    path.write_bytes(b"x")

    def look(path: Path, **given: object) -> os.stat_result:
        status = before(path)
        path.unlink()
        os.mkfifo(path)
        return status

    monkeypatch.setattr(Path, "stat", look)
    with pytest.raises(OSError, match="it is a FIFO, not a regular file"):
        read_regular(path)


def test_a_directory_and_a_missing_file_are_the_errors_that_they_were(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_the_name_in_memory_is_of_the_same_file_whatever_lies_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"first")
    with in_memory(path) as opened:
        path.unlink()
        os.mkfifo(path)
        assert Path(opened).read_bytes() == b"first"


def test_a_model_with_such_a_file_anywhere_is_refused(special: tuple[Path, str]) -> None:
    path, kind = special
    model = path.parents[1]
    if kind == "a socket":  # which no engine can open, and which a model may make for itself
        check_files(model, (), allow_external_links=True)
        return
    hidden = path.rename(path.with_name(".hidden"))
    with pytest.raises(HeadraceError, match=f"'m/1/{hidden.name}' is {kind}: a model consists of regular files"):
        check_files(model, (), allow_external_links=True)
