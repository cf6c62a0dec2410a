"""Control mode ``explicit``, through a server without ports."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from headrace.errors import Code, HeadraceError, NotFound, Unavailable
from headrace.models.states import IndexEntry
from headrace.server import Server

T = TypeVar("T")
MakeServer = Callable[..., Server]
ONE = {"x": np.ones((1, 2), np.float32)}
GATED = """
backend: "gated" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""
BAD = 'backend: "identity" max_batch_size: 8 input { name: "x" data_type: TYPE_FP99 }'
JSON = json.dumps({
    "backend": "gated",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
})  # fmt: skip


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory with the files of loads."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture
def explicit(make_server: MakeServer) -> MakeServer:
    return lambda *names, **options: make_server(model_control_mode="explicit", load_model=names, **options)


def lines(entries: list[IndexEntry]) -> list[tuple[str, str, str]]:
    return [(entry.name, entry.version, entry.state) for entry in entries]


async def refusal(call: Coroutine[Any, Any, None]) -> tuple[Code, str]:
    with pytest.raises(HeadraceError) as caught:
        await call
    return caught.value.code, caught.value.message


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def change(path: Path) -> None:
    """Let a file become longer, if it is there."""
    with path.open("a") as file:
        file.write("x")


def test_only_the_models_asked_for_are_loaded_at_start(write_model: Any, explicit: MakeServer) -> None:
    for name in ("a", "b", "c"):
        write_model(name)

    async def scenario(*names: str) -> list[tuple[str, str, str]]:
        async with explicit(*names) as server:
            assert server.ready
            return lines(await server.list_repository())

    never = [("a", "", ""), ("b", "", ""), ("c", "", "")]
    ready = [(name, "1", "READY") for name in "abc"]
    assert run(scenario()) == never
    assert run(scenario("b", "c", "b")) == [never[0], *ready[1:]]
    assert run(scenario("*")) == ready


def test_a_model_asked_for_and_not_there_stops_the_start(write_model: Any, explicit: MakeServer) -> None:
    write_model("a")
    with pytest.raises(HeadraceError, match="failed to load all models"):
        run(explicit("a", "nope").start())

    async def scenario() -> None:
        async with explicit("a", "nope", exit_on_error=False) as server:
            assert lines(await server.list_repository()) == [("a", "1", "READY")]

    run(scenario())


def test_a_model_is_loaded_unloaded_and_loaded_again(write_model: Any, explicit: MakeServer) -> None:
    write_model("m")

    async def scenario() -> None:
        async with explicit() as server:
            with pytest.raises(NotFound, match="Request for unknown model: 'm' is not found"):
                await server.infer_async("m", ONE)
            await server.load("m")
            await server.infer_async("m", ONE)
            assert lines(await server.list_repository(ready_only=True)) == [("m", "1", "READY")]
            await server.unload("m", unload_dependents=True)
            with pytest.raises(Unavailable, match="version 1 is not at ready state"):
                await server.infer_async("m", ONE, version="1")
            await server._lifecycle.background.settle()
            assert await server.list_repository() == [IndexEntry("m", "1", "UNAVAILABLE", "unloaded")]
            assert await server.list_repository(ready_only=True) == []
            assert server.ready
            await server.load("m")
            await server.infer_async("m", ONE)

    run(scenario())


def test_an_unchanged_model_is_not_loaded_again_and_a_changed_one_is(
    write_model: Any, explicit: MakeServer, gated: Any
) -> None:
    folder = write_model("m", GATED)

    async def scenario() -> None:
        async with explicit("m") as server:
            await server.load("m")
            assert len(gated.loaded) == 1
            change(folder / "shared")
            await server.load("m")
            assert len(gated.loaded) == 2
            (folder / "2").mkdir()
            await server.load("m")
            assert server.ready_versions("m") == [2]

    run(scenario())


def test_a_failed_reload_keeps_the_old_version_and_the_next_load_tries_again(
    write_model: Any, explicit: MakeServer, gated: Any
) -> None:
    folder = write_model("m", GATED)

    async def scenario() -> None:
        async with explicit("m") as server:
            gated.failing.add(1)
            change(folder / "shared")
            for _ in range(2):
                code, text = await refusal(server.load("m"))
                assert text == (
                    "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: version 1 is broken;\n"
                )
                assert code is Code.INVALID_ARGUMENT
            await server.infer_async("m", ONE)
            assert server.ready
            (folder / "config.pbtxt").write_text(BAD)
            code, text = await refusal(server.load("m"))
            assert code is Code.INTERNAL
            assert text.startswith("failed to load 'm', failed to poll from model repository: ")
            assert "TYPE_FP99" in text
            await server.infer_async("m", ONE)
            gated.failing.clear()
            (folder / "config.pbtxt").write_text(GATED)
            await server.load("m")
            assert len(gated.loaded) == 2

    run(scenario())


def test_a_version_that_failed_is_forgotten_once_the_model_is_whole(
    write_model: Any, explicit: MakeServer, gated: Any
) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with explicit("m") as server:
            folder = write_model("m", GATED, (2,))
            gated.failing.add(2)
            await refusal(server.load("m"))
            assert lines(server.index()) == [("m", "1", "READY"), ("m", "2", "UNAVAILABLE")]
            assert not server.ready
            (folder / "2").rmdir()
            await server.load("m")
            assert lines(server.index()) == [("m", "1", "READY")]
            assert server.ready

    run(scenario())


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_without_explicit_mode_nothing_is_controlled(write_model: Any, make_server: MakeServer, mode: str) -> None:
    write_model("m")
    texts = {
        "none": "explicit model load / unload is not allowed in model control mode 'none'; start the server with "
        "--model-control-mode=explicit",
        "poll": "explicit model load / unload is not allowed if polling is enabled",
    }

    async def scenario() -> None:
        async with make_server(model_control_mode=mode) as server:
            for call in (server.load("m"), server.unload("m"), server.load(".."), server.unload("nope")):
                assert await refusal(call) == (Code.UNAVAILABLE, texts[mode])

    run(scenario())


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_a_load_from_another_worker_does_not_reload_a_healthy_model(
    write_model: Any, make_server: MakeServer, mode: str
) -> None:
    """In one of several servers the instance of a model has died, and all servers load it."""
    write_model("m")

    async def scenario() -> None:
        async with make_server(model_control_mode=mode, repository_poll_secs=3600) as server:
            (served,) = server.served("m")
            write_model("m", 'backend: "identity" max_batch_size: 3')
            await server.engine.control.load_here("m", {})
            assert server.served("m") == [served]

    run(scenario())


def test_a_server_that_stops_loads_nothing(write_model: Any, explicit: MakeServer) -> None:
    write_model("m")

    async def scenario() -> None:
        async with explicit() as server:
            pass
        for call in (server.load("m"), server.unload("m")):
            assert await refusal(call) == (Code.UNAVAILABLE, "Server not ready")

    run(scenario())


# ---------------------------------------------------------------------- names

EMPTY = "Model name cannot be empty. Please enter a valid name to deploy."
TRAVERSAL = "invalid model name '{}', model name must not contain path traversal characters"
NAMES = {
    "": EMPTY,
    " \t": EMPTY,
    "..": TRAVERSAL.format(".."),
    ".": TRAVERSAL.format("."),
    "../m": TRAVERSAL.format("../m"),
    "/etc": TRAVERSAL.format("/etc"),
    "m/": TRAVERSAL.format("m/"),
    " .. ": TRAVERSAL.format(".."),
    "\t/etc\n": TRAVERSAL.format("/etc"),
    "m\0": TRAVERSAL.format("m\\0"),
}


@pytest.mark.parametrize("name", NAMES)
def test_name_that_no_model_can_have_is_refused(write_model: Any, explicit: MakeServer, name: str) -> None:
    write_model("m")

    async def scenario() -> None:
        async with explicit() as server:
            assert await refusal(server.load(name)) == (Code.INVALID_ARGUMENT, NAMES[name])
            await server.unload(name)  # as Triton, which finds nothing of that name

    run(scenario())


@pytest.mark.parametrize(
    "name", ["nope", "...", "%2e%2e", "a\\b", "..\\m", "C:", "m\u00a0", "\u2215etc", ".hidden", "x" * 5000]
)
def test_a_name_that_no_model_has_is_not_found_and_not_remembered(
    write_model: Any, explicit: MakeServer, repository: Path, name: str
) -> None:
    write_model("m")
    (repository / ".hidden").mkdir()

    async def scenario() -> None:
        async with explicit() as server:
            text = f"failed to load '{name}', failed to poll from model repository"
            assert await refusal(server.load(name)) == (Code.INTERNAL, text)
            await server.unload(name)
            assert lines(await server.list_repository()) == [("m", "", "")]
            assert len(server._lifecycle._locks) == 0

    run(scenario())


def test_blanks_around_a_name_are_no_part_of_it_when_it_is_loaded_and_are_when_it_is_unloaded(
    write_model: Any, explicit: MakeServer
) -> None:
    write_model("m")

    async def scenario() -> None:
        async with explicit() as server:
            await server.load(" m\n")
            assert lines(server.index()) == [("m", "1", "READY")]
            await server.unload(" m")
            assert lines(server.index()) == [("m", "1", "READY")]

    run(scenario())


# ---------------------------------------------------------------------- versions that did not change

ALL = GATED + "version_policy { all { } }"
#: The change, and the versions that are loaded again for it.
CHANGES: dict[str, tuple[Callable[[Path], object], set[int]]] = {
    "the config is saved again": (lambda model: touch(model / "config.pbtxt"), set()),
    "another config of that name": (lambda model: (model / "configs").mkdir(), set()),
    "a comment in the config": (lambda model: (model / "config.pbtxt").write_text(f"# said\n{ALL}"), set()),
    "another batch size": (lambda model: (model / "config.pbtxt").write_text(ALL.replace("8", "9")), {1, 2}),
    "a file of version 2": (lambda model: change(model / "2" / "weights"), {2}),
    "a file of all": (lambda model: change(model / "labels.txt"), {1, 2}),
    "a new version": (lambda model: (model / "3").mkdir(), {3}),
    "version 1 is gone": (lambda model: (model / "1").rmdir(), set()),
    "fewer versions are wanted": (lambda model: (model / "config.pbtxt").write_text(GATED), set()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_reload_keeps_unchanged_versions(write_model: Any, explicit: MakeServer, gated: Any, what: str) -> None:
    folder = write_model("m", ALL, (1, 2))
    do, again = CHANGES[what]

    async def scenario() -> None:
        async with explicit("m") as server:
            before = {number: server.resolve("m", str(number)) for number in (1, 2)}
            await asyncio.to_thread(do, folder)
            await server.load("m")
            await server._lifecycle.background.settle()
            wanted = {3} | {1, 2} if (folder / "3").exists() else {1, 2}
            if "gone" in what or "fewer" in what:
                wanted = {2}
            assert set(server.ready_versions("m")) == wanted
            changed = {n for n in wanted if server.resolve("m", str(n)) is not before.get(n)}
            assert changed == again
            assert len(gated.loaded) == 2 + len(again)
            for number in wanted:
                await server.infer_async("m", ONE, version=str(number))
            assert server.ready

    run(scenario())


def test_a_version_with_a_dead_instance_is_loaded_again_although_nothing_changed(
    write_model: Any, explicit: MakeServer, gated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("m", ALL, (1, 2))

    async def scenario() -> None:
        async with explicit("m") as server:
            dead, alive = server.resolve("m", "1"), server.resolve("m", "2")
            monkeypatch.setattr(type(dead), "ready", property(lambda model: model is not dead))
            await asyncio.to_thread(touch, folder / "config.pbtxt")
            await server.load("m")
            assert server.resolve("m", "1") is not dead
            assert server.resolve("m", "2") is alive

    run(scenario())


def test_loads_of_one_name_take_turns_and_those_of_others_do_not_wait(
    write_model: Any, explicit: MakeServer, gated: Any
) -> None:
    write_model("m", GATED)
    write_model("n", GATED)

    async def scenario() -> None:
        async with explicit() as server:
            await asyncio.gather(*(server.load(name) for name in "mmmnnn"))
            assert sorted(instance.name for instance in gated.loaded) == ["m_0/1", "n_0/1"]

    run(scenario())


# ---------------------------------------------------------------------- overrides


def test_a_config_of_the_load_takes_the_place_of_the_file_until_that_changes(
    write_model: Any, explicit: MakeServer
) -> None:
    folder = write_model("m")

    async def scenario() -> None:
        async with explicit("m") as server:
            await server.load("m", {"config": JSON.replace("8", "3")})
            assert server.resolve("m").max_batch_size == 3
            await server.load("m")
            assert server.resolve("m").max_batch_size == 3
            touch(folder / "config.pbtxt")
            await server.load("m")
            assert server.resolve("m").max_batch_size == 8

    run(scenario())


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"config": "{"}, "Invalid config override: not JSON: "),
        ({"config": '{"name": "other", "backend": "identity"}'}, "unexpected directory name 'm' for model 'other', "),
        (
            {"config": JSON, "file:../x": b""},
            "Invalid file parameter 'file:../x' with normalized path '../x' must stay ",
        ),
        ({"file:1/x": b""}, "Load parameter 'config' must be specified for model file override"),
    ],
)
def test_a_bad_override_is_the_callers_fault_and_changes_nothing(
    write_model: Any, explicit: MakeServer, parameters: dict[str, str | bytes], text: str, temporary: Path
) -> None:
    write_model("m")

    async def scenario() -> None:
        async with explicit("m") as server:
            code, message = await refusal(server.load("m", parameters))
            assert code is Code.INVALID_ARGUMENT
            assert message.startswith(f"failed to load 'm', failed to poll from model repository: {text}")
            await server.infer_async("m", ONE)
            assert server.ready

    run(scenario())
    assert folders(temporary) == []


def folders(temporary: Path) -> list[Path]:
    """The private directories of models."""
    return [path for path in temporary.glob("headrace-*/*/*/*") if path.is_dir()]


def test_files_of_the_load_are_the_model_until_it_is_unloaded(
    write_model: Any, explicit: MakeServer, temporary: Path, gated: Any
) -> None:
    folder = write_model("m", GATED, (7,))

    async def scenario() -> None:
        async with explicit("m") as server:
            await server.load("m", {"config": JSON, "file:1/weights": b"abc", "file:notes/a.txt": b""})
            (private,) = folders(temporary)
            assert (private / "1" / "weights").read_bytes() == b"abc"
            assert private.name == "m"
            assert server.ready_versions("m") == [1]
            await server._lifecycle.background.settle()
            assert lines(server.index()) == [("m", "1", "READY"), ("m", "7", "UNAVAILABLE")]
            gated.gate.clear()
            waiting = asyncio.ensure_future(server.infer_async("m", ONE))
            await asyncio.sleep(0)
            await server.load("m")
            assert server.ready_versions("m") == [7]
            assert private.exists()
            gated.gate.set()
            await waiting
            await server._lifecycle.background.settle()
            assert not private.exists()
            assert folder.exists()
            await server.load("fresh", {"config": JSON, "file:1/weights": b"abc"})
            await server.infer_async("fresh", ONE)
            assert await refusal(server.load("fresh")) == (
                Code.INTERNAL, "failed to load 'fresh', failed to poll from model repository",
            )  # fmt: skip
            await server.infer_async("fresh", ONE)
            await server.unload("fresh")
            await server._lifecycle.background.settle()
            assert folders(temporary) == []
            await server.load("fresh", {"config": JSON, "file:1/weights": b"abc"})

    run(scenario())
    assert folders(temporary) == []


def test_files_of_a_load_that_fails_are_removed_and_the_name_is_forgotten(
    explicit: MakeServer, temporary: Path, gated: Any
) -> None:
    async def scenario() -> None:
        async with explicit() as server:
            gated.failing.add(2)
            code, text = await refusal(server.load("m", {"config": JSON, "file:2/weights": b""}))
            assert (code, "version 2 is broken" in text) == (Code.INVALID_ARGUMENT, True)
            code, text = await refusal(server.load("m", {"config": JSON, "file:weights": b""}))
            assert text == (
                "load failed for model 'm': at least one version must be available under the version policy of model "
                "'m'. It has no version directory, such as '1', which holds the model's files, and is empty for an "
                "ensemble\n"
            )
            await refusal(server.load("m", {"config": "{", "file:1/weights": b""}))
            await refusal(server.load("x" * 300, {"config": JSON, "file:1/weights": b""}))
            await server._lifecycle.background.settle()
            assert folders(temporary) == []
            assert await server.list_repository() == []
            assert server.ready

    run(scenario())


def test_an_error_names_no_private_directory(explicit: MakeServer, temporary: Path) -> None:
    config = json.loads(JSON)
    config["output"][0]["label_filename"] = "labels.txt"

    async def scenario() -> None:
        async with explicit() as server:
            for wrong in (config, {**config, "backend": "nobody"}, {"name": "n"}):
                _, text = await refusal(server.load("m", {"config": json.dumps(wrong), "file:1/weights": b""}))
                assert str(temporary) not in text, text

    run(scenario())
