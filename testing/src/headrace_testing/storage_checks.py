"""Checks of a storage: its models have the stored files, and changes are detected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from headrace import OptionGroup, Server, ServerOptions, Storage
from headrace_testing.driving import assert_installed, part_of
from headrace_testing.example import NAME
from headrace_testing.plugin import NOT_RUN
from headrace_testing.serving import on_loop

_THREADS = 8
_CONFIG = b"""backend: "identity" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }"""
_LARGE = bytes(range(256)) * 4096
#: Every kind of file. The storage does not read them, so they need not be a model.
_FILES = {
    "config.pbtxt": _CONFIG,
    "labels.txt": "naïve\n".encode(),
    "1/weights": _LARGE,
    "1/deep/er/part": b"\0\r\n\x1a",
    "1/empty": b"",
    "2/weights": b"second",
}
_MODEL = {"config.pbtxt": _CONFIG, "1/weights": b"w"}


class StorageChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``storage``, the scheme, and implements
    `store`."""

    plugin: ClassVar[str]
    storage: ClassVar[str]

    def store(self, models: Mapping[str, Mapping[str, bytes]]) -> str:
        """Make the repository contain exactly ``models`` (by name, then contents by path). Return its URL.

        The URL is the same at each call.
        """
        raise NotImplementedError

    @pytest.fixture
    def opened(self) -> Iterator[Storage]:
        """Yield the storage, created as a server does, with one model."""
        storage = self.open({"m": _FILES})
        yield storage
        storage.close()

    def open(self, models: Mapping[str, Mapping[str, bytes]]) -> Storage:
        """Return the storage over ``models``, with the defaults of its plugin's options."""
        kind: type[Storage] = part_of(self.plugin, "storage", self.storage)
        url = self.store(models)
        scheme = url.partition("://")[0] if "://" in url else "file"
        assert scheme.lower() == self.storage, f"'{url}' is no URL of the storage '{self.storage}'"
        groups: list[type[OptionGroup]] = getattr(import_module(self.plugin), "add_options", list)()
        return kind(url, ServerOptions(model_repository=(url,), plugin_options=[group() for group in groups]))

    def test_it_lists_the_stored_models(self, opened: Storage) -> None:
        assert sorted(opened.models()) == ["m"]
        self.store({"n": _MODEL, "m": _MODEL, "m2": _MODEL})
        assert sorted(opened.models()) == ["m", "m2", "n"]

    def test_a_fingerprint_has_every_file_of_the_model(self, opened: Storage) -> None:
        assert _files(opened, "m") == set(_FILES)

    def test_a_model_has_no_files_of_a_longer_name(self, opened: Storage, tmp_path: Path) -> None:
        self.store({"m": {"config.pbtxt": b"m"}, "m2": {"config.pbtxt": b"m2", "1/w": b""}})
        assert _files(opened, "m") == {"config.pbtxt"}
        assert _files(opened, "m2") == {"config.pbtxt", "1/w"}
        assert read_files(_fetch(opened, "m", tmp_path)) == {"config.pbtxt": b"m"}

    def test_a_fingerprint_is_stable_while_nothing_changes(self, opened: Storage, tmp_path: Path) -> None:
        before = dict(opened.fingerprint("m"))
        _fetch(opened, "m", tmp_path)
        assert dict(opened.fingerprint("m")) == before
        assert len(set(before.values())) <= len(before), "tags can be hashed"

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param({"1/weights": _LARGE[::-1]}, id="contents of the same size"),
            pytest.param({"1/weights": b"short"}, id="size"),
            pytest.param({"1/new": b""}, id="new file"),
            pytest.param({"1/weights": None}, id="removed file"),
        ],
    )
    def test_a_change_of_a_file_changes_its_tag(self, opened: Storage, change: Mapping[str, bytes | None]) -> None:
        before = dict(opened.fingerprint("m"))
        changed = {**_FILES, **change}
        self.store({"m": {path: content for path, content in changed.items() if content is not None}})
        (path,) = change
        assert opened.fingerprint("m").get(path) != before.get(path), f"'{path}' has changed, and its tag has not"

    def test_a_removed_model_has_no_files(self, opened: Storage) -> None:
        assert opened.fingerprint("m")
        self.store({"n": _MODEL})
        assert not opened.fingerprint("m")

    def test_fetched_files_equal_the_stored(self, opened: Storage, tmp_path: Path) -> None:
        assert read_files(_fetch(opened, "m", tmp_path)) == _FILES

    def test_single_files_can_be_fetched(self, opened: Storage, tmp_path: Path) -> None:
        wanted = ["config.pbtxt", "2/weights"]
        directory = opened.fetch("m", wanted, NewDirectories(tmp_path))
        assert {path: (directory / path).read_bytes() for path in wanted} == {path: _FILES[path] for path in wanted}
        assert not opened.whole or read_files(directory) == _FILES, "the storage is `whole`, and its directory is not"

    def test_a_fetch_does_not_change_the_repository(self, opened: Storage, tmp_path: Path) -> None:
        before = dict(opened.fingerprint("m"))
        directory = _fetch(opened, "m", tmp_path / "a")
        if directory.is_relative_to(tmp_path):
            (directory / "1/weights").write_bytes(b"written by a model")
        assert dict(opened.fingerprint("m")) == before
        assert read_files(_fetch(opened, "m", tmp_path / "b")) == _FILES

    def test_a_new_version_does_not_change_a_fetched_one(self, opened: Storage, tmp_path: Path) -> None:
        first = _fetch(opened, "m", tmp_path / "a")
        if not first.is_relative_to(tmp_path):
            pytest.skip(f"{NOT_RUN}{self.storage}: its files are used in place")
        self.store({"m": {**_FILES, "1/weights": b"new"}})
        second = _fetch(opened, "m", tmp_path / "b")
        assert (first / "1/weights").read_bytes() == _LARGE
        assert (second / "1/weights").read_bytes() == b"new"

    def test_threads_fetch_concurrently(self, opened: Storage, tmp_path: Path) -> None:
        self.store({f"m{number}": {**_FILES, "1/weights": b"%d" % number} for number in range(_THREADS)})

        def fetched(number: int) -> bytes:
            return (_fetch(opened, f"m{number}", tmp_path / str(number)) / "1/weights").read_bytes()

        with ThreadPoolExecutor(_THREADS) as pool:
            assert list(pool.map(fetched, range(_THREADS))) == [b"%d" % number for number in range(_THREADS)]

    def test_a_missing_file_is_an_error_and_not_an_empty_file(self, opened: Storage, tmp_path: Path) -> None:
        try:
            directory = opened.fetch("m", ["1/nowhere"], NewDirectories(tmp_path))
        except Exception:
            return
        assert not (directory / "1/nowhere").exists()

    def test_a_server_finds_it_and_serves_its_models(self) -> None:
        url = self.store({NAME: _MODEL})
        server = Server(ServerOptions(model_repository=(url,), model_control_mode="explicit", load_model=(NAME,)))
        assert_installed("storage", self.storage, self.plugin, server.plugins.storages.names())
        x = np.ones((1, 3), np.float32)
        with server:
            np.testing.assert_array_equal(np.asarray(server.infer(NAME, {"x": x}).outputs["y"]), x)
            (served,) = server.served(NAME)
            self.store({NAME: {**_MODEL, "1/weights": b"another"}})
            on_loop(server, server.load(NAME))
            (changed,) = server.served(NAME)
            assert changed is not served, "the model has changed, and is not loaded again"
            assert (changed.model.path / "weights").read_bytes() == b"another"
            on_loop(server, server.load(NAME))
            assert server.served(NAME) == [changed], "the model has not changed, and is loaded again"
            np.testing.assert_array_equal(np.asarray(server.infer(NAME, {"x": x}).outputs["y"]), x)


class NewDirectories:
    """Creates directories called ``name``, as core does."""

    def __init__(self, parent: Path, name: str = "m") -> None:
        self._parent, self._name, self._numbers = parent, name, count()

    def __call__(self) -> Path:
        path = self._parent / f"new{next(self._numbers)}" / self._name
        path.mkdir(parents=True)
        return path


def _files(storage: Storage, model: str) -> set[str]:
    return {path for path in storage.fingerprint(model) if not path.endswith("/")}


def _fetch(storage: Storage, model: str, parent: Path) -> Path:
    """Return a directory with all files of ``model``."""
    return storage.fetch(model, sorted(_files(storage, model)), NewDirectories(parent))


def read_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of the files below ``directory`` by path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
