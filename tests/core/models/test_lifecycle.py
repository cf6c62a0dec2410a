"""Loading, replacing and unloading, through a server without ports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

from headrace.backends.base import Backend, Instance, Model, Tensors
from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError, NotFound, OperatorError, Unavailable
from headrace.models import states as states_module
from headrace.registry import PluginInfo
from headrace.server import Server
from headrace.storage.repositories import Entry
from tests.core.conftest import local_repositories

T = TypeVar("T")
MakeServer = Callable[..., Server]
ONE = {"x": np.ones((1, 2), np.float32)}
GATED = """
backend: "gated" max_batch_size: 8 version_policy { all { } }
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def reload(server: Server, repository: Path, name: str) -> None:
    """Load ``name`` again, after a file that all its versions share has changed."""

    def touch() -> Entry:
        with (repository / name / "shared").open("a") as shared:
            shared.write("x")
        return local_repositories(repository).scan()[name]

    await server._lifecycle.load(await asyncio.to_thread(touch))


def states(server: Server) -> dict[str, tuple[str, str]]:
    return {entry.version: (entry.state, entry.reason) for entry in server.index()}


def test_all_selected_versions_are_served_and_the_latest_answers_by_default(
    write_model: Any, make_server: MakeServer
) -> None:
    write_model("m", GATED, (1, 3))

    async def scenario() -> None:
        async with make_server() as server:
            assert server.ready
            assert (await server.infer_async("m", ONE)).model_version == "3"
            assert (await server.infer_async("m", ONE, version="1")).model_version == "1"
            assert server.ready_versions("m") == [1, 3]

    run(scenario())


def test_a_replaced_version_answers_its_requests_and_none_fails(
    write_model: Any, make_server: MakeServer, repository: Path, gated: Any
) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with make_server() as server:
            gated.gate.clear()
            waiting = [asyncio.ensure_future(server.infer_async("m", ONE)) for _ in range(5)]
            await asyncio.sleep(0)
            await reload(server, repository, "m")
            assert len(gated.loaded) == 2
            assert gated.closed == []
            gated.gate.set()
            assert len(await asyncio.gather(*waiting)) == 5
            await server.infer_async("m", ONE)
        assert len(gated.closed) == 2

    run(scenario())


def test_requests_never_fail_while_a_model_is_replaced_again_and_again(
    write_model: Any, make_server: MakeServer, repository: Path
) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with make_server() as server:
            done = asyncio.Event()

            async def ask() -> int:
                count = 0
                while not done.is_set():
                    await server.infer_async("m", ONE)
                    count += 1
                return count

            askers = [asyncio.ensure_future(ask()) for _ in range(8)]
            for _ in range(20):
                await reload(server, repository, "m")
            done.set()
            assert sum(await asyncio.gather(*askers)) > 0

    run(scenario())


def test_if_one_version_fails_to_load_the_old_ones_stay(
    write_model: Any, make_server: MakeServer, repository: Path, gated: Any
) -> None:
    write_model("m", GATED, (1,))

    async def scenario() -> None:
        async with make_server() as server:
            write_model("m", GATED, (1, 2))
            gated.failing.add(2)
            with pytest.raises(
                OperatorError,
                match=r"load failed for model 'm': version 2 is at UNAVAILABLE state: Internal: version 2 is broken;\n",
            ):
                await reload(server, repository, "m")
            assert states(server) == {"1": ("READY", ""), "2": ("UNAVAILABLE", "Internal: version 2 is broken")}
            await server.infer_async("m", ONE)
            assert not server.ready
            with pytest.raises(Unavailable, match="version 2 is not at ready state"):
                await server.infer_async("m", ONE, version="2")

    run(scenario())


def test_an_unloaded_model_has_a_reason_and_its_instances_are_closed(
    write_model: Any, make_server: MakeServer, gated: Any
) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with make_server() as server:
            await server._lifecycle.unload("m")
            with pytest.raises(NotFound, match="Request for unknown model: 'm' has no available versions"):
                await server.infer_async("m", ONE)
            await server._lifecycle.background.settle()
            assert states(server) == {"1": ("UNAVAILABLE", "unloaded")}
            assert gated.closed == ["m_0/1"]
            assert server.ready

    run(scenario())


def test_an_unloading_model_answers_its_requests(write_model: Any, make_server: MakeServer, gated: Any) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with make_server() as server:
            gated.gate.clear()
            waiting = [asyncio.ensure_future(server.infer_async("m", ONE)) for _ in range(5)]
            await asyncio.sleep(0)
            await server._lifecycle.unload("m")
            assert states(server) == {"1": ("UNLOADING", "")}
            assert not server.ready
            gated.gate.set()
            assert len(await asyncio.gather(*waiting)) == 5
            await server._lifecycle.background.settle()
            assert states(server) == {"1": ("UNAVAILABLE", "unloaded")}

    run(scenario())


def test_a_model_loaded_again_while_it_unloads_stays_ready(
    write_model: Any, make_server: MakeServer, repository: Path, gated: Any
) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with make_server() as server:
            gated.gate.clear()
            waiting = asyncio.ensure_future(server.infer_async("m", ONE))
            await asyncio.sleep(0)
            await server._lifecycle.unload("m")
            await reload(server, repository, "m")
            assert states(server) == {"1": ("READY", "")}
            gated.gate.set()
            await waiting
            await server._lifecycle.background.settle()
            assert states(server) == {"1": ("READY", "")}
            await server.infer_async("m", ONE)

    run(scenario())


def test_a_load_continues_if_its_client_disconnects(
    write_model: Any, make_server: MakeServer, repository: Path, gated: Any
) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with make_server() as server:
            caller = asyncio.ensure_future(reload(server, repository, "m"))
            while not server._lifecycle.background.is_busy:
                await asyncio.sleep(0)
            assert caller.cancel()
            await server._lifecycle.background.settle()
            assert len(gated.loaded) == 2
            assert gated.closed == ["m_0/1"]

    run(scenario())


def test_the_time_that_an_instance_has_to_close_runs_from_when_the_server_begins_to_stop(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(states_module, "monotonic", lambda: now_s)

    async def scenario() -> None:
        nonlocal now_s
        server = make_server(exit_timeout_secs=30)
        async with server:
            deadline = server._lifecycle._loader.deadline
            now_s += 7
            assert deadline() == pytest.approx(0.8 * 30)
        now_s += 10
        assert deadline() == pytest.approx(0.8 * 20)
        now_s += 30
        assert deadline() == 0

    run(scenario())


def test_model_loaded_while_the_server_stops_is_unloaded(
    write_model: Any, make_server: MakeServer, repository: Path, gated: Any
) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with make_server() as server:
            caller = asyncio.ensure_future(reload(server, repository, "m"))
            while not server._lifecycle.background.is_busy:
                await asyncio.sleep(0)
        await caller
        assert len(gated.loaded) == len(gated.closed) == 2

    run(scenario())


def test_instances_of_a_version_that_fails_half_way_are_closed_again(
    write_model: Any, make_server: MakeServer, gated: Any
) -> None:
    write_model(
        "m", GATED + "model_warmup { name: 'w' batch_size: 1 inputs { key: 'x' value { data_type: TYPE_FP32 } } }"
    )

    async def scenario() -> None:
        async with make_server(exit_on_error=False) as server:
            assert not server.ready
            ((state, reason),) = states(server).values()
            assert state == "UNAVAILABLE"
            assert "expects input 'x' to have input_data_type set" in reason

    run(scenario())


@pytest.fixture
def stuck(make_server: MakeServer, write_model: Any) -> Iterator[Callable[..., Server]]:
    """Servers of models ``m0`` and so on, which close only when the test is over."""
    over = threading.Event()

    class Stuck(Instance):
        def execute(self, inputs: Tensors) -> Tensors:
            return inputs

        def close(self) -> None:
            over.wait()

    class StuckBackend(Backend):
        name: ClassVar[str] = "stuck"

        def load(self, model: Model) -> Stuck:
            return Stuck()

    def make(models: int, **options: Any) -> Server:
        for number in range(models):
            write_model(f"m{number}", GATED.replace("gated", "stuck"))
        server = make_server(model_control_mode="explicit", load_model=("*",), **options)
        server.plugins.backends.add(StuckBackend, PluginInfo("stuck", "tests", "0"))
        return server

    yield make
    over.set()


def test_models_that_do_not_end_keep_no_thread_from_the_rest_of_the_server(stuck: Callable[..., Server]) -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        server = stuck(4, exit_timeout_secs=1)
        await server.start()
        for number in range(4):
            await server.unload(f"m{number}")
        entries = await asyncio.wait_for(server.list_repository(), 10)
        assert [entry.state for entry in entries] == ["UNLOADING"] * 4
        with pytest.raises(Unavailable, match="Exit timeout expired"):
            await asyncio.wait_for(server.stop(), 10)

    run(scenario())


def test_a_model_that_does_not_end_is_named_when_the_time_to_stop_is_over_and_not_waited_for_at_the_end(
    stuck: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server = stuck(1, exit_timeout_secs=1)
        await server.start()
        with pytest.raises(Unavailable, match="Exit timeout expired"):
            await server.stop()

    thread = threading.Thread(target=run, args=(scenario(),), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()  # asyncio.run ends, although the instance's thread does not
    assert "'m0' version 1 is still UNLOADING" in caplog.text


def test_a_start_up_failure_stops_the_server_by_default(write_model: Any, make_server: MakeServer) -> None:
    write_model("good")
    write_model("bad", 'backend: "nobody"')
    with pytest.raises(HeadraceError, match="failed to load all models"):
        run(make_server().start())

    async def scenario() -> None:
        async with make_server(exit_on_error=False) as server:
            assert not server.ready
            assert server.live
            await server.infer_async("good", ONE)

    run(scenario())


def test_readiness_follows_the_instances_and_can_be_relaxed(
    write_model: Any, make_server: MakeServer, gated: Any
) -> None:
    write_model("m", GATED)

    async def scenario(strict: bool) -> bool:
        gated.loaded.clear()
        async with make_server(strict_readiness=strict) as server:
            gated.loaded[0].ready = False
            return await server.check_ready()

    assert not run(scenario(True))
    assert run(scenario(False))


def test_a_duplicate_model_is_not_loaded_and_has_a_reason(write_model: Any, repository: Path, tmp_path: Path) -> None:
    write_model("m")
    (tmp_path / "other" / "m" / "1").mkdir(parents=True)

    async def scenario() -> None:
        options = ServerOptions(model_repository=(str(repository), str(tmp_path / "other")), exit_on_error=False)
        async with Server(options) as server:
            (entry,) = server.index()
            assert (entry.version, entry.state) == ("", "UNAVAILABLE")
            assert entry.reason == "model appears in two or more repositories"

    run(scenario())


BROKEN_CONFIGS = {
    "it does not parse": (GATED + "max_batch_sise: 3", True),
    "a type that there is not": (GATED.replace("TYPE_FP32", "TYPE_FP99"), True),
    "no version is there": (GATED.replace("all { }", "specific { versions: [7] }"), False),
    "no such backend": (GATED.replace("gated", "nobody"), False),
}


@pytest.mark.parametrize("why", BROKEN_CONFIGS)
def test_strict_readiness_does_not_count_a_model_whose_config_could_not_be_read(
    write_model: Any, make_server: MakeServer, why: str
) -> None:
    """As Triton does for the same request."""
    config, is_ready = BROKEN_CONFIGS[why]
    write_model("good", GATED)
    write_model("bad", config)

    async def scenario() -> None:
        async with make_server(exit_on_error=False) as server:
            assert server.ready is is_ready
            entries = {entry.name: entry for entry in server.index()}
            assert entries["bad"].state == "UNAVAILABLE"
            assert entries["bad"].reason

    run(scenario())


def test_strict_readiness_does_not_count_a_model_of_two_repositories(
    write_model: Any, make_server: MakeServer, repository: Path, tmp_path: Path
) -> None:
    write_model("m")
    (tmp_path / "other" / "m" / "1").mkdir(parents=True)
    options = ServerOptions(model_repository=(str(repository), str(tmp_path / "other")), exit_on_error=False)

    async def scenario() -> None:
        async with Server(options) as server:
            assert server.ready

    run(scenario())
