"""One broken storage per check. That check must fail. `Memory` is the sound one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from headrace import ServerOptions, Storage, hookimpl
from headrace_testing import StorageConformance
from headrace_testing import storage_checks as checks

Models = Mapping[str, Mapping[str, bytes]]


class Memory(Storage):
    """Stores models in this process: ``memory://``."""

    name = "memory"
    stored: ClassVar[Models] = {}

    def models(self) -> Collection[str]:
        return list(self.stored)

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return {path: sha256(content).digest() for path, content in self.stored.get(model, {}).items()}

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        directory = new_directory()
        for file in files:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_bytes(self.stored[model][file])
        return directory


@pytest.fixture(autouse=True)
def installed(add_part: Callable[..., None]) -> None:
    add_part("storages", lambda: Memory)


class TestMemory(StorageConformance):
    plugin, storage = "headrace_memory", "memory"
    kind: type[Storage] = Memory

    @pytest.fixture(autouse=True)
    def module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = SimpleNamespace(register_storages=hookimpl(lambda: [self.kind]))
        monkeypatch.setitem(sys.modules, "headrace_memory", module)

    def store(self, models: Models) -> str:
        Memory.stored = models
        return "memory://"


class TestLocal(StorageConformance):
    plugin, storage = "headrace.builtins", "file"

    @pytest.fixture(autouse=True)
    def root(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.mktemp("repository")

    def store(self, models: Models) -> str:
        for path in sorted(self.path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for model, files in models.items():
            for file, content in files.items():
                (self.path / model / file).parent.mkdir(parents=True, exist_ok=True)
                (self.path / model / file).write_bytes(content)
        return f"file://{self.path}"


class Remembers(Memory):
    """Lists the models of the time when it was opened."""

    def __init__(self, url: str, options: ServerOptions) -> None:
        super().__init__(url, options)
        self._models = list(self.stored)

    def models(self) -> Collection[str]:
        return self._models


class Flat(Memory):
    """Ignores files in nested directories."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return {path: tag for path, tag in super().fingerprint(model).items() if path.count("/") < 2}


class Prefix(Memory):
    """Includes every model whose name begins with the requested one."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return {path: 0 for name, files in self.stored.items() if name.startswith(model) for path in files}


class Counts(Memory):
    """Returns another tag at each call."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return dict.fromkeys(super().fingerprint(model), object())


class Sizes(Memory):
    """Compares sizes only."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return {path: len(self.stored.get(model, {})[path]) for path in super().fingerprint(model)}


class Names(Memory):
    """Compares names only."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return dict.fromkeys(super().fingerprint(model))


class KeepsRemoved(Memory):
    """Keeps the files of removed models."""

    seen: ClassVar[dict[str, Mapping[str, Hashable]]] = {}

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        self.seen.setdefault(model, super().fingerprint(model))
        return super().fingerprint(model) or self.seen[model]


class Text(Memory):
    """Writes files as text."""

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        directory = super().fetch(model, files, new_directory)
        for file in files:
            (directory / file).write_bytes(self.stored[model][file].replace(b"\r\n", b"\n"))
        return directory


class Needs(Memory):
    """Needs the first version for every other."""

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        return super().fetch(
            model, [file for file in files if file != "2/weights" or "1/empty" in files], new_directory
        )


class Parts(Memory):
    """Declares that it fetches whole models, but fetches parts."""

    whole = True


class Lends(Memory):
    """Returns the same directory for every fetch."""

    lent: ClassVar[dict[str, Path]] = {}

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        if model not in self.lent:
            self.lent[model] = super().fetch(model, files, new_directory)
        return self.lent[model]


class Overwrites(Memory):
    """Keeps one copy, and writes every fetch to it."""

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        return super().fetch(model, files, lambda: Lends.lent.setdefault("of all", new_directory()))


class Mixes(Memory):
    """Stores the model of one fetch where another thread overwrites it."""

    both = threading.Barrier(2)

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        self.model = model
        if model.startswith("m"):
            self.both.wait(20)  # for another thread
        return super().fetch(self.model, files, new_directory)


class Fills(Memory):
    """Creates an empty file for each missing one."""

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        directory = super().fetch(model, [file for file in files if file in self.stored[model]], new_directory)
        for file in files:
            (directory / file).parent.mkdir(exist_ok=True)
            (directory / file).touch()
        return directory


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    yield
    Lends.lent.clear()
    KeepsRemoved.seen.clear()


@pytest.mark.parametrize(
    ("kind", "check", "arguments"),
    [
        (Remembers, "it_lists_the_stored_models", ()),
        (Flat, "a_fingerprint_has_every_file_of_the_model", ()),
        (Prefix, "a_model_has_no_files_of_a_longer_name", ("tmp_path",)),
        (Counts, "a_fingerprint_is_stable_while_nothing_changes", ("tmp_path",)),
        (Sizes, "a_change_of_a_file_changes_its_tag", ({"1/weights": checks._LARGE[::-1]},)),
        (Names, "a_change_of_a_file_changes_its_tag", ({"1/weights": b"short"},)),
        (KeepsRemoved, "a_removed_model_has_no_files", ()),
        (Text, "fetched_files_equal_the_stored", ("tmp_path",)),
        (Parts, "single_files_can_be_fetched", ("tmp_path",)),
        (Needs, "single_files_can_be_fetched", ("tmp_path",)),
        (Lends, "a_fetch_does_not_change_the_repository", ("tmp_path",)),
        (Overwrites, "a_new_version_does_not_change_a_fetched_one", ("tmp_path",)),
        (Mixes, "threads_fetch_concurrently", ("tmp_path",)),
        (Fills, "a_missing_file_is_an_error_and_not_an_empty_file", ("tmp_path",)),
    ],
)
def test_the_check_fails(
    kind: type[Memory], check: str, arguments: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conformance = TestMemory()
    conformance.store({"m": checks._FILES})
    opened = kind("memory://", ServerOptions(model_repository=("memory://",)))
    values = [tmp_path if argument == "tmp_path" else argument for argument in arguments]
    with pytest.raises((AssertionError, KeyError, FileNotFoundError)):
        getattr(conformance, f"test_{check}")(opened, *values)


def test_a_storage_without_an_entry_point_fails_with_the_entry_point() -> None:
    class Hidden(TestMemory):
        storage = "hidden"

        def store(self, models: Models) -> str:
            super().store(models)
            return "hidden://"

    with pytest.raises(AssertionError, match=r"brings storage 'hidden'.*: hidden = \"headrace_memory\""):
        Hidden().test_a_server_finds_it_and_serves_its_models()


def test_a_storage_with_undetected_changes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "fingerprint", lambda self, model: dict.fromkeys(self.stored.get(model, {})))
    with pytest.raises(AssertionError, match="has changed, and is not loaded again"):
        TestMemory().test_a_server_finds_it_and_serves_its_models()
