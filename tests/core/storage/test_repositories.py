"""Which models the repositories of a server have."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace.config.options import ServerOptions
from headrace.errors import Code, ConfigError, HeadraceError, LoadError, PluginError
from headrace.storage.base import Storage
from headrace.storage.repositories import Entry, Repositories
from tests.core.conftest import local_repositories


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
    return root


def test_models_are_the_directories_of_all_roots_in_order_of_name(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a", "m2", ".git"), make(tmp_path / "b", "m1")
    (first / "README.md").touch()
    assert list(local_repositories(first, second).scan()) == ["m1", "m2"]


def test_a_name_in_two_roots_is_a_duplicate(tmp_path: Path) -> None:
    entries = local_repositories(make(tmp_path / "a", "m"), make(tmp_path / "b", "m")).scan()
    assert entries["m"].is_duplicate


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "m/1", "m/", "m\0", ".git", "README.md", "M", "m ", "%6d"])
def test_only_the_exact_name_of_a_model_finds_it(tmp_path: Path, name: str) -> None:
    root = make(tmp_path / "a", "m", ".git")
    (root / "README.md").touch()
    repositories = local_repositories(root)
    assert repositories.find("m") == repositories.scan()["m"]
    assert repositories.find(name) is None


def test_a_root_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"nowhere.*not a valid directory"):
        local_repositories(tmp_path / "nowhere").scan()


class Shelf(Storage):
    """A storage whose functions the test sets."""

    name = "shelf"
    files: ClassVar[dict[str, Hashable]] = {}
    act: ClassVar[Callable[..., Path]]
    given_back: ClassVar[list[Path]] = []

    def models(self) -> Collection[str]:
        return ["m"]

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return self.files

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        return type(self).act(files, new_directory)

    def release(self, model: str, directory: Path) -> None:
        self.given_back.append(directory)
        raise RuntimeError("this error is logged only")


class OnlyShelf:
    def get(self, name: str) -> type[Storage]:
        assert name == "shelf"
        return Shelf


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Entry]:
    """The model of a `Shelf`; new directories are made below ``tmp_path``."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    repositories = Repositories(ServerOptions(model_repository=("SHELF://one",)), OnlyShelf())
    entry = repositories.find("m")
    assert entry is not None
    yield entry
    repositories.close()
    Shelf.given_back.clear()


class WithOthers:
    """Has `Shelf` for other schemes; two plugins have ``two``."""

    def get(self, name: str) -> type[Storage]:
        if name == "*":
            return Shelf
        if name == "two":
            raise LoadError("storage 'two' is registered by both")
        raise LoadError("no plugin provides it", Code.INVALID_ARGUMENT)


def test_a_storage_may_have_every_scheme_that_no_other_has() -> None:
    repositories = Repositories(ServerOptions(model_repository=("rare://one",)), WithOthers())
    assert list(repositories.scan()) == ["m"]
    with pytest.raises(ConfigError, match="registered by both"):
        Repositories(ServerOptions(model_repository=("two://one",)), WithOthers()).scan()


def left(tmp_path: Path) -> list[Path]:
    """Return the directories of models below ``tmp_path``."""
    return [path for path in tmp_path.rglob("m") if path.is_dir()]


def written(files: Collection[str], new_directory: Callable[[], Path]) -> Path:
    into = new_directory()
    for file in files:
        (into / file).write_text(file)
    return into


def act(monkeypatch: pytest.MonkeyPatch, fetch: Callable[..., Any]) -> None:
    monkeypatch.setattr(Shelf, "act", staticmethod(fetch), raising=False)


def test_a_new_directory_is_private_and_removed_by_its_last_user(
    shelf: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act(monkeypatch, written)
    with shelf.fetch(["a", "1/", "2/deep/"]) as directory:
        assert directory.path.name == "m"
        assert directory.path.stat().st_mode & 0o077 == 0
        assert sorted(path.name for path in directory.path.iterdir()) == ["1", "2", "a"], "empty directories are made"
        assert directory.hide(f"in {directory.path}/a") == "in m/a"
        other = directory.share()
    assert (other.path / "a").read_text() == "a"
    other.release()
    other.release()
    assert left(tmp_path) == []


def test_a_directory_of_the_storage_is_returned_to_it(
    shelf: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    act(monkeypatch, lambda files, new_directory: own)
    with shelf.fetch(["a"]) as directory:
        assert directory.path == own
        assert directory.hide(str(own)) == str(own)
        assert Shelf.given_back == []
    assert Shelf.given_back == [own]
    assert own.is_dir()


def fails(files: Collection[str], new_directory: Callable[[], Path]) -> Path:
    new_directory()
    raise ConnectionError("no route")


def links(files: Collection[str], new_directory: Callable[[], Path]) -> Path:
    into = new_directory()
    (into / "a").symlink_to("/etc/hostname")
    return into


def blocks(files: Collection[str], new_directory: Callable[[], Path]) -> Path:
    into = new_directory()
    os.mkfifo(into / "a")
    return into


@pytest.mark.parametrize(
    ("fetch", "text"),
    [
        (fails, r"storage 'shelf' of 'SHELF://one' failed to fetch model 'm': ConnectionError: no route"),
        (links, r"'m/a' is a link that leads out of the model repository"),
        (blocks, r"'m/a' is a FIFO"),
    ],
)
def test_failed_fetch_is_an_error_that_leaves_no_files(
    shelf: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetch: Callable[..., Path], text: str
) -> None:
    act(monkeypatch, fetch)
    with pytest.raises(HeadraceError, match=text):
        shelf.fetch(["a"])
    assert left(tmp_path) == []


@pytest.mark.parametrize("path", ["../m2/a", "/etc/passwd", "1/../../a", "1//a", "./a", "a\0", "", ".."])
def test_a_path_out_of_the_model_is_an_error_of_the_storage(
    shelf: Entry, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(Shelf, "files", {path: 0})
    with pytest.raises(PluginError, match="which is no path below its directory"):
        shelf.fingerprint()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0"])
def test_a_name_that_no_model_can_have_is_the_storages_fault(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Shelf, "models", lambda self: [name])
    repositories = Repositories(ServerOptions(model_repository=("shelf://",)), OnlyShelf())
    with pytest.raises(PluginError, match="which cannot be the name of a model"):
        repositories.scan()
