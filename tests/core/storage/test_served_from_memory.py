"""Models in no directory of this machine: the calls of their storage, and the directories that remain."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError
from headrace.models.control import Watcher
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.server import Server
from headrace.storage.base import Storage

CONFIG = b"""
backend: "identity" max_batch_size: 8 version_policy { all { } }
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_FP32 dims: [1] label_filename: "labels.txt" }
model_warmup { name: "w" batch_size: 1 inputs { key: "x" value {
  data_type: TYPE_FP32 dims: 1 input_data_file: "data" } } }
"""
MODEL = {"config.pbtxt": CONFIG, "labels.txt": b"a\n", "warmup/data": bytes(4), "1/weights": b"1", "2/weights": b"2"}
ONE = {"x": np.ones((1, 1), np.float32)}


class Cupboard(Storage):
    name = "cupboard"
    stored: ClassVar[dict[str, dict[str, bytes]]] = {}
    fetched: ClassVar[list[list[str]]] = []

    def models(self) -> Collection[str]:
        return list(self.stored)

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return {path: hash(content) for path, content in self.stored.get(model, {}).items()}

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        self.fetched.append(sorted(files))
        directory = new_directory()
        for file in files:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_bytes(self.stored[model][file])
        return directory


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    discover = Plugins.discover

    def with_cupboard(*arguments: Any) -> Plugins:
        plugins = discover(*arguments)
        plugins.storages.add(Cupboard, PluginInfo("cupboard", "tests", "0"))
        return plugins

    monkeypatch.setattr(Plugins, "discover", with_cupboard)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    Cupboard.stored = {"m": dict(MODEL)}
    yield
    Cupboard.fetched.clear()


def serve(*more: str, **options: Any) -> Server:
    return Server(ServerOptions(model_repository=("cupboard://", *more), exit_on_error=False, **options))


def names(server: Server) -> set[str]:
    return {model.name for model in server.served()}


def left(tmp_path: Path) -> list[Path]:
    """Return the directories that models have now."""
    return sorted(path for path in (tmp_path / "temporary").rglob("m") if path.is_dir())


def test_each_version_has_a_directory_with_its_files_and_those_that_all_share(tmp_path: Path) -> None:
    shared = ["config.pbtxt", "labels.txt", "warmup/data"]
    with serve() as server:
        assert server.infer("m", ONE).model_version == "2"
        assert server.served("m")[0].labels == {"y": ["a"]}
        assert sorted(Cupboard.fetched) == [sorted([*shared, "1/weights"]), sorted([*shared, "2/weights"]), shared]
        places = sorted(model.model.path for model in server.served("m"))
        assert [path.name for path in sorted(places, key=lambda path: path.name)] == ["1", "2"]
        assert left(tmp_path) == sorted(path.parent for path in places), "what the config was read from is gone"
    assert left(tmp_path) == []


def test_only_the_changed_version_is_fetched_and_its_old_directory_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(model_control_mode="explicit", load_model=("m",)) as server:
            one, two = sorted(server.served("m"), key=lambda model: model.version)
            Cupboard.stored["m"]["2/weights"] = b"new"
            Cupboard.fetched.clear()
            await server.load("m")
            unchanged, changed = sorted(server.served("m"), key=lambda model: model.version)
            assert unchanged is one
            assert changed is not two
            assert [files for files in Cupboard.fetched if "1/weights" in files] == []
            while two.model.path.exists():  # when its last instance has closed
                await asyncio.sleep(0.01)
            assert one.model.path.exists()
            del Cupboard.stored["m"]["labels.txt"]
            with pytest.raises(HeadraceError, match=r"cannot read label file 'm/labels\.txt'"):
                await server.load("m")
            assert len(server.served("m")) == 2, "what is served stays"

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert left(tmp_path) == []


def test_a_watched_model_follows_its_storage(tmp_path: Path) -> None:
    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with serve() as server:
            watcher = Watcher(server._control._repositories, server._lifecycle, 0.01, dev=False, known_only=False)
            await watcher.prepare()
            watcher.start()
            before = server.served("m")
            Cupboard.stored["m"]["1/weights"] = b"new"
            await until(lambda: server.served("m") != before)
            Cupboard.stored["n"] = dict(MODEL)
            await until(lambda: "n" in names(server))
            del Cupboard.stored["m"]
            await until(lambda: names(server) == {"n"})
            watcher.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert left(tmp_path) == []


def test_a_name_in_two_storages_is_a_duplicate(tmp_path: Path) -> None:
    (tmp_path / "local" / "m" / "1").mkdir(parents=True)
    with serve(str(tmp_path / "local")) as server:
        (entry,) = server.index()
        assert entry.reason == "model appears in two or more repositories"
