"""The server follows changes of the repository, in mode poll and with ``--dev``."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

from headrace.errors import Unavailable
from headrace.models.control import Watcher
from headrace.registry import PluginInfo
from headrace.server import Server
from headrace.storage.base import Storage
from headrace.storage.repositories import Repositories
from tests.core.conftest import IDENTITY, local_repositories

T = TypeVar("T")
TWICE = "model appears in two or more repositories"
ONE = {"x": np.ones((1, 2), np.float32)}
GATED = """
backend: "gated" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""
BROKEN = GATED.replace("TYPE_FP32", "TYPE_FP99")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.fixture
def watched(make_server: Callable[..., Server], repository: Path) -> Callable[..., Any]:
    """A running server. Its repository, and ``others`` beside it, are compared a hundred times a second."""

    @asynccontextmanager
    async def watched(
        dev: bool = True, known_only: bool = False, others: Sequence[Path] = (), **options: Any
    ) -> AsyncIterator[Server]:
        async with make_server(exit_on_error=False, **options) as server:
            how = {"dev": dev, "known_only": known_only}
            watcher = Watcher(local_repositories(repository, *others), server._lifecycle, 0.01, **how)
            await watcher.prepare()
            watcher.start()
            try:
                yield server
            finally:
                watcher.stop()

    return watched


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def shown(server: Server) -> list[tuple[str, str, str]]:
    return [(entry.name, entry.version, entry.state) for entry in server.index()]


def change(model: Path) -> None:
    """Let a file that all versions share become longer."""
    with (model / "shared").open("a") as shared:
        shared.write("x")


@pytest.mark.parametrize("dev", [True, False])
def test_models_are_loaded_reloaded_and_unloaded_with_the_repository(
    watched: Callable[..., Any], write_model: Any, gated: Any, dev: bool
) -> None:
    folder = write_model("m", GATED)

    async def scenario() -> None:
        async with watched(dev) as server:
            change(folder)
            await until(lambda: len(gated.loaded) == 2)
            write_model("n", GATED)
            await until(lambda: ("n", "1", "READY") in shown(server))
            (folder / "2").mkdir()
            await until(lambda: server.ready_versions("m") == [2])
            await asyncio.to_thread(shutil.rmtree, folder)
            await until(lambda: ("m", "2", "UNAVAILABLE") in shown(server))
            assert server.ready
            await server.infer_async("n", ONE)

    run(scenario())


def test_a_failed_reload_keeps_the_old_version_until_the_next_change(
    watched: Callable[..., Any], write_model: Any, gated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model("m", GATED)

    async def scenario() -> None:
        async with watched() as server:
            write_model("m", BROKEN)
            await until(lambda: any("failed to load 'm'" in text for text in caplog.messages))
            await server.infer_async("m", ONE)
            write_model("m", GATED)
            change(folder)
            await until(lambda: len(gated.loaded) == 2)
            assert server.ready

    run(scenario())
    assert sum("failed to load 'm'" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("dev", [True, False])
def test_a_model_in_two_repositories_is_unloaded_until_one_is_removed(
    dev: bool, watched: Callable[..., Any], write_model: Any, gated: Any, tmp_path: Path
) -> None:
    """As in Triton 2.51, which shows the same reason."""
    folder = write_model("m", GATED)
    second = tmp_path / "second"
    second.mkdir()

    async def scenario() -> None:
        async with watched(dev, others=[second]) as server:
            for removed in (second / "m", folder):
                await asyncio.to_thread(shutil.copytree, folder, second / "m")
                await until(lambda: [entry.reason for entry in server.index()] == [TWICE])
                assert shown(server) == [("m", "", "UNAVAILABLE")]
                assert not server.ready_versions("m")
                await asyncio.to_thread(shutil.rmtree, removed)
                await until(lambda: shown(server) == [("m", "1", "READY")])
                await server.infer_async("m", ONE)

    run(scenario())
    assert len(gated.loaded) == 3


def test_a_model_that_was_loaded_by_name_is_served_on_while_a_second_repository_has_it(
    watched: Callable[..., Any], write_model: Any, gated: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model("m", GATED)
    second = tmp_path / "second"
    second.mkdir()

    async def scenario() -> None:
        async with watched(known_only=True, others=[second]) as server:
            await asyncio.to_thread(shutil.copytree, folder, second / "m")
            await until(lambda: any(TWICE in text for text in caplog.messages))
            assert shown(server) == [("m", "1", "READY")]
            await asyncio.to_thread(shutil.rmtree, folder)
            await until(lambda: len(gated.loaded) == 2)
            await server.infer_async("m", ONE)

    run(scenario())


def test_mode_poll_tries_a_failed_load_again(watched: Callable[..., Any], write_model: Any, gated: Any) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with watched(dev=False) as server:
            gated.failing.add(2)
            write_model("m", GATED, (2,))
            await until(lambda: ("m", "2", "UNAVAILABLE") in shown(server))
            gated.failing.clear()
            await until(lambda: server.ready_versions("m") == [2])

    run(scenario())


def test_mode_poll_logs_the_reason_of_a_repeated_failure_once(
    watched: Callable[..., Any], write_model: Any, gated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_model("m", GATED)

    def lines(text: str) -> int:
        return sum(text in message for message in caplog.messages)

    async def scenario() -> None:
        async with watched(dev=False) as server:
            for attempt, version in enumerate((2, 3), 1):  # a change since then is logged again
                gated.failing.add(version)
                write_model("m", GATED, (version,))
                await until(lambda version=version: gated.refused.count(version) > 4)  # type: ignore[misc]
                assert lines("'m' has changed: loading it") == attempt
                assert lines("failed to load 'm'") == attempt
            gated.failing.clear()
            await until(lambda: server.ready_versions("m") == [3])

    run(scenario())


def test_a_broken_new_model_has_a_reason_until_it_is_removed(watched: Callable[..., Any], write_model: Any) -> None:
    async def scenario() -> None:
        async with watched() as server:
            folder = write_model("m", BROKEN)
            await until(lambda: bool(server.index()))
            (entry,) = server.index()
            assert entry.state == "UNAVAILABLE"
            assert "TYPE_FP99" in entry.reason
            assert server.ready  # what cannot even be read is not counted
            await asyncio.to_thread(shutil.rmtree, folder)
            await until(lambda: server.index() == [])
            assert server.ready

    run(scenario())


def test_a_failed_version_is_removed_with_its_model(watched: Callable[..., Any], write_model: Any, gated: Any) -> None:
    gated.failing.add(1)
    folder = write_model("m", GATED)

    async def scenario() -> None:
        async with watched() as server:
            assert shown(server) == [("m", "1", "UNAVAILABLE")]
            await asyncio.to_thread(shutil.rmtree, folder)
            await until(lambda: server.index() == [])

    run(scenario())


def test_a_model_that_is_not_served_is_left_alone_in_explicit_mode(
    watched: Callable[..., Any], write_model: Any, gated: Any
) -> None:
    served = write_model("served", GATED)
    other = write_model("other", GATED)

    async def scenario() -> None:
        async with watched(known_only=True, model_control_mode="explicit", load_model=("served",)) as server:
            change(other)
            change(served)
            await until(lambda: len(gated.loaded) == 2)
            assert shown(server) == [("served", "1", "READY")]

    run(scenario())


def test_a_file_that_is_still_being_written_waits_with_dev_and_not_in_mode_poll(
    make_server: Callable[..., Server], repository: Path
) -> None:
    old, new, newer = {"m": 1}, {"m": 2}, {"m": 3}

    async def scenario() -> None:
        async with make_server() as server:
            for dev in (True, False):
                watcher = Watcher(local_repositories(repository), server._lifecycle, 1, dev=dev, known_only=False)
                watcher._handled = old  # type: ignore[assignment]
                assert not watcher._is_due("m", new, old)
                assert watcher._is_due("m", old, new) is not dev
                assert watcher._is_due("m", new, newer) is not dev
                assert watcher._is_due("m", newer, newer)
                assert watcher._is_due("m", {}, {})

    run(scenario())


@pytest.mark.parametrize(("options", "watches"), [
    ({}, False),
    ({"model_control_mode": "poll"}, True),
    ({"model_control_mode": "poll", "repository_poll_secs": 0}, False),
    ({"model_control_mode": "explicit"}, False),
    ({"dev": True}, True),
])  # fmt: skip
def test_only_mode_poll_and_dev_watch(
    make_server: Callable[..., Server], options: dict[str, Any], watches: bool
) -> None:
    async def scenario() -> None:
        before = len(asyncio.all_tasks())
        async with make_server(**options):
            assert (len(asyncio.all_tasks()) > before) is watches

    run(scenario())


@pytest.mark.parametrize("dev", [True, False])
def test_a_change_of_instance_groups_changes_instances_only(
    watched: Callable[..., Any], write_model: Any, gated: Any, dev: bool
) -> None:
    def write(count: int) -> None:
        write_model("m", f"{GATED} instance_group {{ kind: KIND_CPU count: {count} }}  # {'x' * count}")

    write(2)

    async def scenario() -> None:
        async with watched(dev) as server:
            (served,) = server.served("m")
            write(3)
            await until(lambda: len(served.executors) == 3)
            write(1)
            await until(lambda: len(gated.closed) == 2)
            assert len(gated.loaded) == 3
            assert server.served("m") == [served]
            await server.infer_async("m", ONE)

    run(scenario())


def test_a_server_that_stops_ends_its_watcher(make_server: Callable[..., Server]) -> None:
    async def scenario() -> None:
        async with make_server(exit_on_error=False, model_control_mode="poll") as server:
            watcher = server._control._watcher
            assert watcher is not None
            task = watcher._task
            assert task is not None
            assert not task.done()
        assert task.cancelled()

    run(scenario())


@pytest.mark.parametrize("mode", [{"model_control_mode": "poll", "repository_poll_secs": 1}, {"dev": True}])
def test_a_repository_that_is_missing_at_start_is_served_when_it_is_there(
    make_server: Callable[..., Server],
    repository: Path,
    write_model: Any,
    mode: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton 2.51 stays without models for ever."""
    begin = Watcher.__init__

    def often(watcher: Watcher, repositories: Any, lifecycle: Any, interval_s: float, **how: bool) -> None:
        begin(watcher, repositories, lifecycle, 0.01, **how)

    monkeypatch.setattr(Watcher, "__init__", often)
    away = repository.with_name("away")

    async def scenario() -> None:
        async with make_server(exit_on_error=False, **mode) as server:
            assert not server.ready
            with pytest.raises(Unavailable, match=r"^Server not ready$"):
                server.engine.resolve("m")
            await until(lambda: "cannot poll the repository" in caplog.text)
            away.rename(repository)
            await until(lambda: server.ready)
            assert shown(server) == [("m", "1", "READY")]
            write_model("n")
            await until(lambda: ("n", "1", "READY") in shown(server))

    write_model("m")
    repository.rename(away)
    run(scenario())
    assert caplog.text.count("cannot poll the repository") == 1  # not at every poll


def test_an_empty_directory_in_place_of_the_repository_unloads_nothing(
    watched: Callable[..., Any], repository: Path, write_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A mount point without its volume. In the same directory, a deleted model is unloaded, also the last one."""
    away = repository.with_name("away")

    def unmount() -> None:
        repository.rename(away)
        repository.mkdir()

    def mount() -> None:
        repository.rmdir()
        away.rename(repository)

    async def scenario() -> None:
        async with watched(dev=False) as server:
            unmount()
            await until(lambda: "is a volume missing?" in caplog.text)
            assert shown(server) == [("m", "1", "READY")]
            mount()
            await until(lambda: "the repository can be read again" in caplog.text)
            assert shown(server) == [("m", "1", "READY")]
            shutil.rmtree(repository / "m")
            await until(lambda: shown(server) == [("m", "1", "UNAVAILABLE")])

    caplog.set_level(logging.INFO)
    write_model("m")
    run(scenario())


class Cabinet(Storage):
    """Models in memory, one of which has a tag that cannot be read while ``fails``."""

    name = "cabinet"
    fails: ClassVar[bool]
    drawers: ClassVar[dict[str, str]]

    def models(self) -> Sequence[str]:
        return list(self.drawers)

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        if model == "bad" and self.fails:
            raise OSError("the drawer is stuck")
        return {"config.pbtxt": self.drawers[model], "1/weights": "1"}

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        folder = new_directory()
        (folder / "1").mkdir()
        (folder / "1" / "weights").touch()
        (folder / "config.pbtxt").write_text(self.drawers[model])
        return folder


def test_a_model_that_cannot_be_read_does_not_stop_the_poll_of_others() -> None:
    Cabinet.fails, Cabinet.drawers = True, {"bad": IDENTITY, "good": IDENTITY}

    async def scenario() -> None:
        server = Server("cabinet://all", exit_on_error=False)
        server.plugins.storages.add(Cabinet, PluginInfo("cabinet", "tests", "0"))
        async with server:
            repositories = Repositories(server.options, server.plugins.storages)
            watcher = Watcher(repositories, server._lifecycle, 0.01, dev=False, known_only=False)
            await watcher.prepare()
            watcher.start()
            (bad, good) = server.index()
            assert (good.name, good.state) == ("good", "READY")
            assert (bad.name, bad.state) == ("bad", "UNAVAILABLE")
            assert "the drawer is stuck" in bad.reason
            Cabinet.drawers["late"] = IDENTITY
            await until(lambda: ("late", "1", "READY") in shown(server))
            Cabinet.fails = False
            await until(lambda: ("bad", "1", "READY") in shown(server))
            Cabinet.fails = True  # it is served as before
            Cabinet.drawers["later"] = IDENTITY
            await until(lambda: ("later", "1", "READY") in shown(server))
            assert ("bad", "1", "READY") in shown(server)
            watcher.stop()

    run(scenario())
