"""The server in a script and in async code, without ports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace
from headrace.engine import Phase
from headrace.frontends.base import Frontend
from headrace.server import Server
from headrace_testing.serving import on_loop
from tests.core.conftest import IDENTITY

MakeServer = Callable[..., Server]
GATED = """
backend: "gated" max_batch_size: 1
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""


def x(*rows: float) -> dict[str, Any]:
    return {"x": np.array(rows, np.float32).reshape(-1, 1)}


def y(answer: headrace.InferResponse) -> npt.NDArray[Any]:
    return np.asarray(answer.outputs["y"])


def test_with_and_infer_serve_a_repository_from_a_script(write_model: Any, repository: Path) -> None:
    write_model("m")
    with headrace.Server(repository) as server:
        answer = server.infer("m", x(1, 2))
        assert y(answer).tolist() == [[1], [2]]
        assert (answer.model_name, answer.model_version) == ("m", "1")


def test_async_with_and_infer_async_serve_it_from_async_code(write_model: Any, repository: Path) -> None:
    write_model("m")

    async def scenario() -> None:
        async with headrace.Server(repository) as server:
            answers = await asyncio.gather(*(server.infer_async("m", x(number)) for number in range(50)))
            assert [float(y(answer)[0, 0]) for answer in answers] == list(range(50))

    asyncio.run(scenario())


def test_infer_async_may_be_awaited_on_another_loop(write_model: Any, repository: Path) -> None:
    write_model("m")
    with headrace.Server(repository) as server:
        answer = asyncio.run(server.infer_async("m", x(5)))
    assert y(answer).tolist() == [[5]]


def test_infer_before_start_and_after_stop_says_how_to_run_the_server(write_model: Any, repository: Path) -> None:
    write_model("m")
    server = headrace.Server(repository)
    with pytest.raises(headrace.Unavailable, match="inside 'with Server"):
        server.infer("m", x(1))
    with server:
        pass
    with pytest.raises(headrace.Unavailable, match="inside 'with Server"):
        server.infer("m", x(1))
    with pytest.raises(headrace.Unavailable, match="inside 'with Server"):
        asyncio.run(server.infer_async("m", x(1)))


def test_infer_on_the_servers_own_loop_is_refused_instead_of_hanging(write_model: Any, repository: Path) -> None:
    write_model("m")

    async def scenario() -> None:
        async with headrace.Server(repository) as server:
            with pytest.raises(headrace.Unsupported, match="await infer_async"):
                server.infer("m", x(1))

    asyncio.run(scenario())


def test_an_exception_in_a_script_still_stops_the_server(write_model: Any, repository: Path) -> None:
    write_model("m")
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), headrace.Server(repository):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-m")]
    assert threading.active_count() <= before + 1


def test_a_script_gets_the_reason_why_a_repository_does_not_load(write_model: Any, repository: Path) -> None:
    write_model("m", 'backend: "onnxrunime"')
    with pytest.raises(headrace.HeadraceError, match="failed to load all models"), headrace.Server(repository):
        pass


@pytest.mark.parametrize(
    ("model", "version", "kind", "text"),
    [
        ("nobody", "", headrace.NotFound, "Request for unknown model: 'nobody' is not found"),
        ("m", "9", headrace.NotFound, "Request for unknown model: 'm' version 9 is not found"),
        ("m", "a", headrace.InvalidArgument, "failed to get model version from specified version string 'a'"),
        ("m", "-1", headrace.InvalidArgument, "invalid model version specified '-1' , version should be"),
        ("m", "9" * 30, headrace.InvalidArgument, "failed to get model version from specified version string"),
        ("m", 9, headrace.NotFound, "Request for unknown model: 'm' version 9 is not found"),
        ("m", 0, headrace.NotFound, "Request for unknown model: 'm' version 0 is not found"),
        ("m", -1, headrace.InvalidArgument, "invalid model version specified '-1' , version should be"),
        ("m", None, headrace.InvalidArgument, "failed to get model version from specified version string 'None'"),
    ],
)
def test_unknown_models_and_versions_are_refused_in_tritons_words(
    write_model: Any, repository: Path, model: str, version: Any, kind: type[Exception], text: str
) -> None:
    write_model("m")
    with headrace.Server(repository) as server:
        for ask in (partial(server.infer, model, x(1), version=version), partial(server.explain, model, version)):
            with pytest.raises(kind, match=text):
                ask()


def test_a_version_is_its_number_or_its_text(write_model: Any, repository: Path) -> None:
    write_model("m", IDENTITY + "version_policy { all { } }", (1, 2))
    with headrace.Server(repository) as server:
        for version in (1, "1", "01"):
            server.infer("m", x(1), version=version)
            assert server.resolve("m", version).version == 1
            assert [model.version for model in server.served("m", version)] == [1]
            assert on_loop(server, server.is_model_ready("m", version))
        assert len(server.explain("m", 1)["batches"]) == 3
        assert len(server.explain("m", 2)["batches"]) == 0


def test_a_cancelled_await_is_removed_from_the_queue(write_model: Any, make_server: MakeServer, gated: Any) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        async with make_server() as server:
            gated.gate.clear()
            model = server.resolve("m")
            running = asyncio.ensure_future(server.infer_async("m", x(1)))
            while (model.model_queue.in_flight, model.model_queue.pending) != (1, 0):
                await asyncio.sleep(0)
            waiting = asyncio.ensure_future(server.infer_async("m", x(2)))
            while (model.model_queue.in_flight, model.model_queue.pending) != (2, 1):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert model.model_queue.pending == 0
            gated.gate.set()
            await running
            assert model.snapshot().cancelled.count == 1

    asyncio.run(scenario())


def test_stopping_waits_for_requests_in_flight(write_model: Any, make_server: MakeServer, gated: Any) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        server = make_server()
        await server.start()
        gated.gate.clear()
        waiting = [asyncio.ensure_future(server.infer_async("m", x(n))) for n in range(3)]
        await asyncio.sleep(0)
        stopping = asyncio.ensure_future(server.stop())
        await asyncio.sleep(0)
        assert (server.engine.exiting, server.ready, server.live) == (True, False, False)
        gated.gate.set()
        await stopping
        assert [float(y(await each)[0, 0]) for each in waiting] == [0, 1, 2]

    asyncio.run(scenario())


def test_stopping_ends_after_the_exit_timeout(write_model: Any, make_server: MakeServer, gated: Any) -> None:
    write_model("m", GATED)

    async def scenario() -> None:
        server = make_server(exit_timeout_secs=0)
        await server.start()
        gated.gate.clear()
        waiting = [asyncio.ensure_future(server.infer_async("m", x(n))) for n in range(2)]
        model = server.resolve("m")
        while model.model_queue.pending != 1:
            await asyncio.sleep(0)
        with pytest.raises(headrace.Unavailable, match=r"^Exit timeout expired"):
            await server.stop()
        for caller in waiting:  # the one that is executed, and the one that waits
            with pytest.raises(headrace.Unavailable, match="Server is stopping"):
                await caller
        gated.gate.set()
        await asyncio.to_thread(model.join)
        assert gated.closed == ["m_0/1"]
        assert model.snapshot().executions.inference_count <= 1  # what waited was not begun any more

    asyncio.run(scenario())


class Stubborn(Frontend):
    """A frontend that fails to stop."""

    name = "stubborn"
    enabled = True

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        raise OSError("it does not close")


def test_a_frontend_that_fails_to_stop_keeps_nothing_else_from_stopping(
    write_model: Any, make_server: MakeServer, gated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_model("m", GATED)
    stopped: list[str] = []

    class Docile(Stubborn):
        name = "docile"

        async def stop(self) -> None:
            await asyncio.sleep(0)
            stopped.append("docile")

    async def scenario() -> None:
        server = make_server()
        await server.start()
        server.frontends += [Stubborn(server.engine), Docile(server.engine)]
        await server.stop()
        assert server.phase is Phase.STOPPED

    asyncio.run(scenario())
    assert stopped == ["docile"]
    assert gated.closed == ["m_0/1"]
    assert "frontend 'stubborn' failed to stop" in caplog.text
    assert "it does not close" in caplog.text


def test_a_scheduler_that_fails_to_drain_keeps_no_model_from_closing(
    write_model: Any, make_server: MakeServer, gated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model("m", GATED)
    write_model("n", GATED)

    async def drain() -> None:
        raise ValueError("no idea")

    async def scenario() -> None:
        server = make_server()
        await server.start()
        monkeypatch.setattr(server.resolve("m").model_queue, "drain", drain)
        await server.stop()
        assert [(entry.state, entry.reason) for entry in server.index()] == [("UNAVAILABLE", "unloaded")] * 2

    asyncio.run(scenario())
    assert sorted(gated.closed) == ["m_0/1", "n_0/1"]


def test_the_capacity_of_a_model_fills_its_instances(write_model: Any, repository: Path) -> None:
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }'
    for name, config in {
        "batches": "max_batch_size: 4 dynamic_batching { } instance_group { count: 3 }",
        "direct": "max_batch_size: 4 instance_group { count: 3 }",
        "streams": "model_transaction_policy { decoupled: true }",
    }.items():
        write_model(name, f'backend: "identity" {config} {tensors}')
    with headrace.Server(repository) as server:
        views = {name: server.engine.resolve(name) for name in ("batches", "direct", "streams")}
        assert {name: view.capacity() for name, view in views.items()} == {"batches": 12, "direct": 3, "streams": 0}
        server.infer("direct", x(1.0))
        assert views["direct"].occupancy.last_ns > 0


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_capacity_of_a_model_is_the_same_while_it_executes(
    write_model: Any, repository: Path, isolation: str
) -> None:
    write_model(
        "m",
        'backend: "identity" input { name: "x" data_type: TYPE_FP32 dims: [1] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [1] } '
        'parameters { key: "execute_delay_ms" value { string_value: "300" } } '
        f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}',
    )
    with headrace.Server(repository) as server, ThreadPoolExecutor(1) as callers:
        view = server.engine.resolve("m")
        inference = callers.submit(server.infer, "m", {"x": np.ones(1, np.float32)})
        capacities = set()
        while not inference.done():
            if view.occupancy.in_flight:
                capacities.add(view.capacity())
        assert capacities == {1}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=4), min_size=1, max_size=40))
def test_any_interleaving_of_requests_gives_each_caller_its_own_rows(
    write_model: Any, repository: Path, requests: list[list[float]]
) -> None:
    write_model(
        "m",
        'backend: "identity" max_batch_size: 4 dynamic_batching { } instance_group { count: 3 } '
        'input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }',
    )
    with headrace.Server(repository) as server, ThreadPoolExecutor(8) as callers:
        answers = list(callers.map(lambda rows: y(server.infer("m", x(*rows))).ravel().tolist(), requests))
    assert answers == requests


def test_the_public_names_are_those_of_all() -> None:
    assert len(set(headrace.__all__)) == len(headrace.__all__)
    assert all(hasattr(headrace, name) for name in headrace.__all__)
