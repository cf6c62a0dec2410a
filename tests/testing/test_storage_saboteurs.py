"""One broken storage per check, each to be caught by the check that is meant for it; `Memory` is the sound one."""

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
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace_testing import StorageConformance
from headrace_testing import storage_checks as checks

Models = Mapping[str, Mapping[str, bytes]]


class Memory(Storage):
    """Models of this process: ``memory://``."""

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
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server finds `Memory`, as if its distribution was installed."""
    discover = Plugins.discover

    def with_memory(*arguments: Any) -> Plugins:
        plugins = discover(*arguments)
        if "memory" not in plugins.storages.names():
            plugins.storages.add(Memory, PluginInfo("memory", "tests", "0"))
        return plugins

    monkeypatch.setattr(Plugins, "discover", with_memory)


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
    """Lists what there was when it was opened."""

    def __init__(self, url: str, options: ServerOptions) -> None:
        super().__init__(url, options)
        self._models = list(self.stored)

    def models(self) -> Collection[str]:
        return self._models


class Flat(Memory):
    """Sees the files of the first directory only."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return {path: tag for path, tag in super().fingerprint(model).items() if path.count("/") < 2}


class Prefix(Memory):
    """Takes every model whose name begins with the one that it was asked for."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return {path: 0 for name, files in self.stored.items() if name.startswith(model) for path in files}


class Counts(Memory):
    """Returns another tag at each call."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return dict.fromkeys(super().fingerprint(model), object())


class Sizes(Memory):
    """Takes contents of one size for the same."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return {path: len(self.stored.get(model, {})[path]) for path in super().fingerprint(model)}


class Names(Memory):
    """Compares nothing but names."""

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return dict.fromkeys(super().fingerprint(model))


class Haunted(Memory):
    """Keeps the files of models that are removed."""

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
    """Says that it fetches whole models, and fetches parts."""

    whole = True


class Lends(Memory):
    """Gives the same directory to all."""

    lent: ClassVar[dict[str, Path]] = {}

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        if model not in self.lent:
            self.lent[model] = super().fetch(model, files, new_directory)
        return self.lent[model]


class Overwrites(Memory):
    """Keeps one copy, and writes what is new into it."""

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        return super().fetch(model, files, lambda: Lends.lent.setdefault("of all", new_directory()))


class Mixes(Memory):
    """Keeps between two steps of a fetch what belongs to one."""

    both = threading.Barrier(2)

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        self.asked = model
        if model.startswith("m"):
            self.both.wait(20)  # until another thread has come as far
        return super().fetch(self.asked, files, new_directory)


class Fills(Memory):
    """Returns an empty file for each that it lacks."""

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        directory = super().fetch(model, [file for file in files if file in self.stored[model]], new_directory)
        for file in files:
            (directory / file).parent.mkdir(exist_ok=True)
            (directory / file).touch()
        return directory


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    Lends.lent.clear()
    Haunted.seen.clear()


@pytest.mark.parametrize(
    ("kind", "check", "arguments"),
    [
        (Remembers, "it_lists_the_models_that_are_stored", ()),
        (Flat, "a_fingerprint_has_every_file_of_the_model", ()),
        (Prefix, "a_model_has_no_files_of_one_whose_name_begins_alike", ("tmp_path",)),
        (Counts, "a_fingerprint_stays_while_nothing_changes", ("tmp_path",)),
        (Sizes, "a_change_of_a_file_shows", ({"1/weights": checks._LARGE[::-1]},)),
        (Names, "a_change_of_a_file_shows", ({"1/weights": b"short"},)),
        (Haunted, "a_model_that_is_gone_has_no_files", ()),
        (Text, "what_is_fetched_is_what_was_stored", ("tmp_path",)),
        (Parts, "files_can_be_fetched_by_themselves", ("tmp_path",)),
        (Needs, "files_can_be_fetched_by_themselves", ("tmp_path",)),
        (Lends, "a_fetch_leaves_the_repository_as_it_was", ("tmp_path",)),
        (Overwrites, "a_new_version_does_not_touch_the_one_that_is_served", ("tmp_path",)),
        (Mixes, "threads_may_fetch_at_once", ("tmp_path",)),
        (Fills, "a_file_that_is_not_there_is_an_error_and_not_an_empty_file", ("tmp_path",)),
    ],
)
def test_the_check_catches_it(
    kind: type[Memory], check: str, arguments: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conformance = TestMemory()
    conformance.store({"m": checks._FILES})
    opened = kind("memory://", ServerOptions(model_repository=("memory://",)))
    given = [tmp_path if argument == "tmp_path" else argument for argument in arguments]
    with pytest.raises((AssertionError, KeyError, FileNotFoundError)):
        getattr(conformance, f"test_{check}")(opened, *given)


def test_a_storage_that_no_server_would_find_is_told_of_its_entry_point() -> None:
    class Hidden(TestMemory):
        storage = "hidden"

        def store(self, models: Models) -> str:
            super().store(models)
            return "hidden://"

    with pytest.raises(AssertionError, match=r"brings storage 'hidden'.*: hidden = \"headrace_memory\""):
        Hidden().test_a_server_finds_it_and_serves_its_models()


def test_a_storage_whose_changes_no_server_would_see_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "fingerprint", lambda self, model: dict.fromkeys(self.stored.get(model, {})))
    with pytest.raises(AssertionError, match="has changed, and is not loaded again"):
        TestMemory().test_a_server_finds_it_and_serves_its_models()
